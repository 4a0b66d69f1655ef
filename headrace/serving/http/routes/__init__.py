"""One module per API: request conversion, response writers, handlers, and their ``ENDPOINTS``."""
