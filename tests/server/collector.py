"""An OpenTelemetry collector of OTLP over HTTP on a loopback port, well-behaved or misbehaving."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

HANG_S_MAX = 60.0
ENDLESS_BYTES = 100 << 20


class Collector(ThreadingHTTPServer):
    """A collector that keeps the spans that it receives.

    Attributes:
        spans: all spans so far.
        posts: number of requests so far.
        authorization: Authorization header of the last request; "" without one.
        status: status of the responses.
        may_answer: while it is cleared, no request gets a response.
        is_endless: whether responses have more bytes than any client reads.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Span] = []
        self.posts = 0
        self.authorization = ""
        self.status = 200
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.is_endless = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posts += 1
        self.server.authorization = self.headers.get("Authorization", "")
        self.server.may_answer.wait(HANG_S_MAX)
        if self.path == "/v1/traces" and self.server.status == 200:
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for of_scope in of_resource.scope_spans:
                    self.server.spans.extend(of_scope.spans)
        self.send_response(self.server.status)
        self.send_header("Content-Length", f"{ENDLESS_BYTES if self.server.is_endless else 0}")
        self.end_headers()
        if self.server.is_endless:
            with suppress(ConnectionError):
                for _ in range(ENDLESS_BYTES >> 20):
                    self.wfile.write(bytes(1 << 20))

    def log_message(self, *args: object) -> None:
        """Logs nothing: the tests report what is wrong."""


@contextmanager
def collecting() -> Iterator[Collector]:
    """Runs a collector until the block ends."""
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield collector
        finally:
            collector.may_answer.set()
            collector.shutdown()
            thread.join()
