"""HTTP/1: requests as streams, with a fast path for plain embed requests."""
