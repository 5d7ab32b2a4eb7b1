"""gRPC over HTTP/2: its messages, statuses and methods; without I/O."""
