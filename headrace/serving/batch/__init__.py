"""Files of requests in OpenAI's batch format, answered without a socket."""
