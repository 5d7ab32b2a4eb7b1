"""HTTP/2 (RFC 9113) without I/O: bytes in, bytes out; what streams carry goes to their handlers."""
