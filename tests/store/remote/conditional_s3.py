"""Proxy that adds conditional writes, as AWS and MinIO have them, to an S3 server without them.

All writes must pass through it: it knows only the keys that it has written.
"""

import threading
from contextlib import AbstractContextManager
from urllib.parse import urlsplit

from store.remote.s3_proxy import Response, S3Proxy, serve_proxy

PRECONDITION_FAILED = (
    b"<Error><Code>PreconditionFailed</Code><Message>exists already</Message></Error>"
)


def serve_conditional(endpoint: str) -> AbstractContextManager[str]:
    """Yields the URL of a proxy of ``endpoint``. It rejects a PUT with ``If-None-Match: *`` for a
    key that exists."""
    written: set[str] = set()
    lock = threading.Lock()

    class Conditional(S3Proxy):
        def respond(self, body: bytes) -> Response:
            key = urlsplit(self.path).path
            is_conditional = self.headers.get("If-None-Match") == "*"
            with lock:
                if self.command == "PUT" and is_conditional and key in written:
                    return 412, {"Content-Type": "application/xml"}, PRECONDITION_FAILED
                status, headers, answer = self.forward(body)
                if status < 300 and self.command in ("PUT", "DELETE"):
                    (written.add if self.command == "PUT" else written.discard)(key)
            return status, headers, answer

    return serve_proxy(Conditional, endpoint)
