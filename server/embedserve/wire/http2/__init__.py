"""HTTP/2 (RFC 9113): bytes in, bytes out. Stream handlers receive request bodies. Only protocol.py
has the transport, whose ``write`` it also passes to FrameWriter."""
