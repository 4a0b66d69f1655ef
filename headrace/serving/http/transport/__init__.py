"""Between the socket and the routes: connections, request bodies, errors, access, recording, metrics, traces."""
