"""An OpenTelemetry collector of OTLP over HTTP on a loopback port, well-behaved or misbehaving."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from server.other_servers import serve_http

HANG_S_MAX = 60.0
ENDLESS_BYTES = 100 << 20


class Collector:
    """A collector that keeps the spans that it receives.

    Attributes:
        url: its address.
        spans: all spans so far.
        resource: string attributes of the server that sent the last of them.
        posts: number of requests so far.
        authorization: Authorization header of the last request; "" without one.
        status: status of the responses.
        may_answer: while it is cleared, no request gets a response.
        is_endless: whether responses have more bytes than any client reads.
    """

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Span] = []
        self.resource: dict[str, str] = {}
        self.posts = 0
        self.authorization = ""
        self.status = 200
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.is_endless = False

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        self.posts += 1
        self.authorization = handler.headers.get("Authorization", "")
        self.may_answer.wait(HANG_S_MAX)
        if handler.path == "/v1/traces" and self.status == 200:
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                sender = of_resource.resource.attributes
                self.resource = {one.key: one.value.string_value for one in sender}
                for of_scope in of_resource.scope_spans:
                    self.spans.extend(of_scope.spans)
        handler.send_response(self.status)
        handler.send_header("Content-Length", f"{ENDLESS_BYTES if self.is_endless else 0}")
        handler.end_headers()
        if self.is_endless:
            with suppress(ConnectionError):
                for _ in range(ENDLESS_BYTES >> 20):
                    handler.wfile.write(bytes(1 << 20))


def attributes(span: Span) -> dict[str, object]:
    """Returns the values of the attributes of ``span`` by name without "embedserve."."""
    return {
        one.key.removeprefix("embedserve."): one.value.string_value or one.value.int_value
        for one in span.attributes
    }


@contextmanager
def collecting() -> Iterator[Collector]:
    """Runs a collector until the block ends."""
    collector = Collector()
    with serve_http(collector.respond) as collector.url:
        try:
            yield collector
        finally:
            collector.may_answer.set()
