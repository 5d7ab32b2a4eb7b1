"""Conditional writes before an S3 server that has none, as AWS, MinIO and others have them.

All writes must come through it: it knows a key once it was written here.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

REFUSED = b"<Error><Code>PreconditionFailed</Code><Message>exists already</Message></Error>"
OF_THE_CONNECTION = ("connection", "transfer-encoding", "content-length")


@contextmanager
def serve_conditional(endpoint: str) -> Iterator[str]:
    """Yields the URL of a server that passes requests on to ``endpoint``, and PUT with
    ``If-None-Match: *`` only for keys that are not there."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(endpoint))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(endpoint: str) -> type[BaseHTTPRequestHandler]:
    upstream = urlsplit(endpoint).netloc
    written: set[str] = set()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            key = urlsplit(self.path).path
            is_conditional = self.headers.get("If-None-Match") == "*"
            with lock:
                if self.command == "PUT" and is_conditional and key in written:
                    self.answer(412, {"Content-Type": "application/xml"}, REFUSED)
                    return
                status, headers, answer = self.asked(body)
                if status < 300 and self.command in ("PUT", "DELETE"):
                    (written.add if self.command == "PUT" else written.discard)(key)
            self.answer(status, headers, answer)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

        def asked(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection(upstream, timeout=60)
            headers = dict(self.headers.items())
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            content = response.read()
            connection.close()
            return response.status, dict(response.getheaders()), content

        def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in OF_THE_CONNECTION:
                    self.send_header(name, value)
            length = headers.get("Content-Length", "0") if self.command == "HEAD" else len(body)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler
