"""Tests that management requests start in order, a few in each event-loop iteration."""

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from hyperframe.frame import HeadersFrame, RstStreamFrame
from server.fake_engine import FakeEngine
from server.live import make_pipeline
from server.waiting import until
from server.wire.http2.peer import Peer, data, of

from embedserve.wire.asgi import MANAGEMENT_BODY_BYTES_MAX, Receive, Scope, Send
from embedserve.wire.grpc.service import GrpcService
from embedserve.wire.http2.control import STREAMS_MAX
from embedserve.wire.http2.frames import FRAME_BYTES_MAX
from embedserve.wire.http_stream import Headers
from embedserve.wire.management_turns import WAITING_BODY_BYTES_MAX
from embedserve.wire.route_table import PROBE_PATHS, PROBES_PER_ITERATION, RouteTable

REQUESTS = 100
"""Requests on each connection, fewer than its limit on streams."""


class CountingApp:
    """Responds to each request immediately, but to /wait only when it may.

    Attributes:
        paths: paths of the requests in the order of their calls.
        calls: number of calls in each event-loop iteration.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.calls = Counter[int]()
        self.may_respond = asyncio.Event()
        self._iteration = 0
        self._loop = asyncio.get_running_loop()
        self._count_iterations()

    def _count_iterations(self) -> None:
        self._iteration += 1
        self._loop.call_soon(self._count_iterations)

    def has_calls(self, count: int) -> bool:
        return len(self.paths) == count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        self.calls[self._iteration] += 1
        if scope["path"] == "/wait":
            await self.may_respond.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})


class ManagementPeer(Peer):
    """A connection whose requests are all management requests."""

    def __init__(self, routes: RouteTable) -> None:
        super().__init__(routes.resolve_http2)
        self._next_id = 1

    def request(self, path: str, body: bytes = b"") -> int:
        """Sends a request; returns its stream id."""
        stream_id, self._next_id = self._next_id, self._next_id + 2
        head: Headers = [
            (b":method", b"POST" if body else b"GET"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", b"h"),
        ]
        frames = [data(stream_id, body, is_end=True)] if body else []
        self.send(self.headers(stream_id, head, is_end=not body), *frames)
        return stream_id

    def statuses(self) -> dict[int, int]:
        """Returns the statuses of all responses since the last call, by stream."""
        self.take()
        found = of(self.seen, HeadersFrame)
        self.seen.clear()
        return {one.stream_id: int(dict(self.response_headers(one))[b":status"]) for one in found}


@pytest.fixture
async def app() -> CountingApp:
    return CountingApp()


@pytest.fixture
def routes(app: CountingApp, executor: ThreadPoolExecutor) -> RouteTable:
    pipeline = make_pipeline(FakeEngine(), executor=executor)
    return RouteTable(pipeline, app, GrpcService(pipeline))


async def test_one_management_request_begins_per_iteration(
    app: CountingApp, routes: RouteTable
) -> None:
    peers = [ManagementPeer(routes) for _ in range(2)]
    streams = [[peer.request(f"/{i}") for i in range(REQUESTS)] for peer in peers]
    assert app.paths == []
    await until(lambda: len(app.paths) == 2 * REQUESTS)
    assert max(app.calls.values()) == 1
    for peer, sent in zip(peers, streams, strict=True):
        assert peer.statuses() == dict.fromkeys(sent, 200)


async def test_next_management_request_begins_after_the_previous(
    app: CountingApp, routes: RouteTable
) -> None:
    """Sends each request after the previous response, with a withdrawn request before it."""
    peer = ManagementPeer(routes)
    for i in range(REQUESTS):
        withdrawn = peer.request("/withdrawn")
        peer.send(RstStreamFrame(withdrawn))
        peer.request("/a")
        peer.request("/b")
        await until(partial(app.has_calls, 2 * (i + 1)))
    assert app.paths == ["/a", "/b"] * REQUESTS
    assert max(app.calls.values()) == 1


async def test_connections_take_turns_at_management_requests(
    app: CountingApp, routes: RouteTable
) -> None:
    first, second = ManagementPeer(routes), ManagementPeer(routes)
    for i in range(REQUESTS):
        first.request(f"/first/{i}")
    second.request("/second")
    await until(lambda: len(app.paths) == REQUESTS + 1)
    assert app.paths.index("/second") == 1
    app.paths.remove("/second")
    assert app.paths == [f"/first/{i}" for i in range(REQUESTS)]


@pytest.mark.parametrize("iterations", [0, 1], ids=["waits", "has its turn"])
async def test_request_reset_before_its_start_does_not_run(
    app: CountingApp, routes: RouteTable, iterations: int
) -> None:
    peer = ManagementPeer(routes)
    reset = peer.request("/reset")
    kept = peer.request("/kept")
    for _ in range(iterations):
        await asyncio.sleep(0)
    assert app.paths == []
    peer.send(RstStreamFrame(reset))
    await until(lambda: app.paths)
    assert app.paths == ["/kept"]
    assert peer.statuses() == {kept: 200}


async def test_awaiting_request_does_not_block_others(app: CountingApp, routes: RouteTable) -> None:
    peer = ManagementPeer(routes)
    waiting = peer.request("/wait")
    others = [peer.request(f"/{i}") for i in range(REQUESTS)]
    await until(lambda: len(app.paths) == 1 + REQUESTS)
    assert peer.statuses() == dict.fromkeys(others, 200)
    app.may_respond.set()
    await until(lambda: peer.statuses() == {waiting: 200})


@pytest.mark.parametrize("path", sorted(PROBE_PATHS))
async def test_probes_do_not_wait_for_other_requests(
    app: CountingApp, routes: RouteTable, path: str
) -> None:
    peer = ManagementPeer(routes)
    for i in range(REQUESTS):
        peer.request(f"/{i}")
    probes = [peer.request(path) for _ in range(PROBES_PER_ITERATION)]
    await until(lambda: len(app.paths) == REQUESTS + len(probes))
    assert app.paths[: len(probes) + 1].count(path) == len(probes)
    statuses = peer.statuses()
    assert [statuses[probe] for probe in probes] == [200] * len(probes)


async def test_number_of_probes_per_iteration_is_limited(
    app: CountingApp, routes: RouteTable
) -> None:
    peers = [ManagementPeer(routes) for _ in range(2)]
    for peer in peers:
        for _ in range(REQUESTS):
            peer.request("/health/live")
    await until(lambda: len(app.paths) == 2 * REQUESTS)
    assert max(app.calls.values()) == PROBES_PER_ITERATION


async def test_waiting_bodies_are_bounded(app: CountingApp, routes: RouteTable) -> None:
    """Checks also that requests without a body wait, and that a withdrawn request makes room.

    The room is free immediately.
    """
    assert FRAME_BYTES_MAX < MANAGEMENT_BODY_BYTES_MAX
    body = bytes(FRAME_BYTES_MAX)
    count = WAITING_BODY_BYTES_MAX // FRAME_BYTES_MAX
    peers = [ManagementPeer(routes) for _ in range(count // STREAMS_MAX)]
    streams = [[peer.request("/a", body) for _ in range(STREAMS_MAX)] for peer in peers]
    last = ManagementPeer(routes)
    rejected, scrape = last.request("/a", body), last.request("/metrics")
    assert last.statuses() == {rejected: 429}
    peers[0].send(RstStreamFrame(streams[0].pop()))
    accepted = last.request("/a", body)
    assert last.statuses() == {}
    await until(lambda: len(app.paths) == count + 1)
    assert last.statuses() == {scrape: 200, accepted: 200}
    for peer, sent in zip(peers, streams, strict=True):
        assert peer.statuses() == dict.fromkeys(sent, 200)
    again = last.request("/a", body)
    await until(lambda: last.statuses() == {again: 200})
