"""REST embed requests over HTTP/1 and HTTP/2."""
