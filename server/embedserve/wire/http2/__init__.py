"""HTTP/2 (RFC 9113) without I/O: bytes in, bytes out. Stream handlers receive request bodies."""
