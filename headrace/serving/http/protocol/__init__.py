"""What goes over the wire: request and answer records, and the fields that are refused by name. No behaviour."""
