"""gRPC over HTTP/2: messages, statuses and methods, without I/O."""
