"""Requests that several modules of the HTTP/1 tests send."""

import json

from server.raw_http import get

BODY = b'{"features": {"user": [[1, 2]], "movie": [[3]]}}'
OTHER_BODY = b'{"features": {"user": [[6], [5]]}}'
MISSING_ROW_BODY = b'{"features": {"user": [[99]]}}'
LARGE_BODY = json.dumps({"features": {"user": [[i % 7] for i in range(2000)]}}).encode()
CLOSING_REQUEST = get("/health/live", "Connection: close")
