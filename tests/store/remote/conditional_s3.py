"""Conditional writes before an S3 server that has none, as AWS, MinIO and others have them.

All writes must come through it: it knows a key once it was written here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from store.remote.s3_proxy import Response, S3Proxy, serve_proxy

REFUSED = b"<Error><Code>PreconditionFailed</Code><Message>exists already</Message></Error>"


@contextmanager
def serve_conditional(endpoint: str) -> Iterator[str]:
    """Yields the URL of a server that passes requests on to ``endpoint``, and PUT with
    ``If-None-Match: *`` only for keys that are not there."""
    with serve_proxy(_handler(), endpoint) as url:
        yield url


def _handler() -> type[S3Proxy]:
    written: set[str] = set()
    lock = threading.Lock()

    class Conditional(S3Proxy):
        def respond(self, body: bytes) -> Response:
            key = urlsplit(self.path).path
            is_conditional = self.headers.get("If-None-Match") == "*"
            with lock:
                if self.command == "PUT" and is_conditional and key in written:
                    return 412, {"Content-Type": "application/xml"}, REFUSED
                status, headers, answer = self.asked(body)
                if status < 300 and self.command in ("PUT", "DELETE"):
                    (written.add if self.command == "PUT" else written.discard)(key)
            return status, headers, answer

    return Conditional
