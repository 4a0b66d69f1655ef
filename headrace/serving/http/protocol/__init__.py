"""Wire types: request and response records, and the fields that are refused by name. No behaviour."""
