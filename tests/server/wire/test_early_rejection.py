"""Tests of rejections by headers, which HTTP/2 caches: prepared once, counted for each request."""

import weakref
from collections.abc import Callable

import pytest
from hyperframe.frame import HeadersFrame
from server.pipelines import outcomes_of
from server.wire.http2.peer import Peer, of, raw

from embedserve.access.authenticator import headers_by_name
from embedserve.api.management import management_app
from embedserve.pipeline import RequestPipeline
from embedserve.wire import early_rejection
from embedserve.wire.grpc.service import GrpcService
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http2.request_headers import ResolvedRoute
from embedserve.wire.http_stream import Headers
from embedserve.wire.route_table import RouteTable

POST: Headers = [(b":method", b"POST"), (b":scheme", b"http")]
OTHER_METHOD: Headers = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/embed")]
UNKNOWN_CALL = [*POST, (b":path", b"/no/Method"), (b"content-type", b"application/grpc")]
NUMBER = 20
LARGE_HEADERS: Headers = [(b"x", b"y" * 17_000)]


@pytest.fixture
def routes(pipeline: RequestPipeline) -> RouteTable:
    return RouteTable(pipeline, management_app(pipeline), GrpcService(pipeline))


@pytest.fixture
def ids_of(routes: RouteTable) -> Callable[[Headers], list[bytes]]:
    """Sends equal requests; returns the request ids of their responses."""

    def send_requests(headers: Headers) -> list[bytes]:
        peer = Peer(routes.resolve_http2)
        block = encode(headers)
        frames = peer.send(*[raw(1, 0x5, 2 * i + 1, block) for i in range(NUMBER)])
        responses = of(frames, HeadersFrame)
        return [dict(peer.response_headers(one))[b"x-request-id"] for one in responses]

    return send_requests


@pytest.mark.parametrize(
    ("headers", "protocol", "code"),
    [(OTHER_METHOD, "rest", "INVALID_ARGUMENT"), (UNKNOWN_CALL, "grpc", "UNIMPLEMENTED")],
    ids=["rest", "grpc"],
)
def test_rejections_of_equal_requests_parse_headers_once_and_count_each(
    headers: Headers,
    protocol: str,
    code: str,
    pipeline: RequestPipeline,
    ids_of: Callable[[Headers], list[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[Headers] = []

    def count(headers: Headers) -> dict[bytes, bytes]:
        read.append(headers)
        return headers_by_name(headers)

    monkeypatch.setattr(early_rejection, "headers_by_name", count)
    assert len(set(ids_of(headers))) == NUMBER
    assert len(read) == 1
    assert outcomes_of(pipeline.metrics.protocols[protocol]) == {code: NUMBER}


@pytest.mark.parametrize("headers", [OTHER_METHOD, UNKNOWN_CALL], ids=["rest", "grpc"])
def test_valid_request_id_is_returned(
    headers: Headers, ids_of: Callable[[Headers], list[bytes]]
) -> None:
    assert ids_of([*headers, (b"x-request-id", b"mine")]) == [b"mine"] * NUMBER
    made = ids_of([*headers, (b"x-request-id", b"two words")])
    assert len(set(made)) == NUMBER
    assert all(len(one) == 32 for one in made)


class Received:
    """A stand-in for the bytes that a connection is reading, in a frame that resolves a route."""


@pytest.mark.parametrize(
    "headers",
    [
        OTHER_METHOD,
        [*POST, (b":path", b"/embed"), (b"x-timeout-ms", b"soon")],
        [*POST, (b":path", b"/\xff")],
        [*OTHER_METHOD, *LARGE_HEADERS],
        UNKNOWN_CALL,
        [*UNKNOWN_CALL, (b"grpc-timeout", b"soon")],
        [*UNKNOWN_CALL, *LARGE_HEADERS],
    ],
)
def test_cached_rejection_holds_no_stack_frames(headers: Headers, routes: RouteTable) -> None:
    """Checks that no traceback is kept: it would hold all active frames."""

    def resolve() -> tuple[ResolvedRoute | str, weakref.ref[Received]]:
        received = Received()
        return routes.resolve_http2(headers), weakref.ref(received)

    route, received = resolve()
    assert isinstance(route, ResolvedRoute)
    assert received() is None
