"""Base of proxies in front of a real S3 server that change some of its responses."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import urlsplit

OF_THE_CONNECTION = ("connection", "transfer-encoding", "content-length")
Response = tuple[int, dict[str, str], bytes]


class S3Proxy(BaseHTTPRequestHandler):
    """Forwards requests. Subclasses respond to some requests themselves."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # the body would wait for an ACK, up to 40 ms
    upstream: ClassVar[str]

    def respond(self, body: bytes) -> Response:
        """Returns the response to a request."""
        return self.forward(body)

    def forward(self, body: bytes) -> Response:
        """Forwards the request; returns the server's response."""
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        headers = dict(self.headers.items())
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, dict(response.getheaders()), content

    def handle_request(self) -> None:
        nbytes = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(nbytes)
        if len(body) < nbytes:  # the client was interrupted
            self.close_connection = True
            return
        status, headers, answer = self.respond(body)
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in OF_THE_CONNECTION:
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else len(answer)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def serve_proxy(handler: type[S3Proxy], endpoint: str) -> Iterator[str]:
    """Yields the URL of a proxy of ``endpoint`` that ``handler`` serves."""
    before = type(handler.__name__, (handler,), {"upstream": urlsplit(endpoint).netloc})
    server = ThreadingHTTPServer(("127.0.0.1", 0), before)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
