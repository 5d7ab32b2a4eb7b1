"""gRPC as an ASGI application: what comes of bytes that no gRPC client sends, and of many calls.

Without a network by events, as ASGI has them; with one in the Envoy that all tests share. What
both servers have in common is in test_grpc.py and test_grpc_stream.py.
"""

from __future__ import annotations

import asyncio
import gzip
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server.channels import OWN_CONNECTION
from server.envoy_server import Envoy, RemoteEngine, reset
from server.fake_engine import FakeEngine
from server.live import IN_THREAD, make_service
from server.waiting import until

from embedserve.config import Limits
from embedserve.frontends.grpc_asgi import GrpcApp
from embedserve.frontends.grpc_server import SERVICE_NAME
from embedserve.frontends.grpc_stream import WINDOW_REQUESTS_MAX
from embedserve.frontends.grpc_wire import framed
from embedserve.service import Service
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

REQUEST = pb.EmbedRequest(keys=["user"], ids=[1], lengths=[1])
MESSAGE = REQUEST.SerializeToString()
EMBED = f"/{SERVICE_NAME}/Embed"
STREAM = f"/{SERVICE_NAME}/EmbedStream"
GRPC = {"content-type": "application/grpc", "te": "trailers"}
LIMITS = Limits(body_bytes_max=10_000)
CALLS = 4000
CONCURRENT = 64


class Client:
    """One call's client, by ASGI events.

    Attributes:
        sent: what the application sent.
        is_gone: receive() says so from now on.
    """

    def __init__(self, *pieces: bytes, is_open: bool = False) -> None:
        self.sent: list[dict[str, Any]] = []
        self.is_gone = False
        last = len(pieces) - 1
        self._events = [
            {"type": "http.request", "body": piece, "more_body": is_open or i < last}
            for i, piece in enumerate(pieces)
        ]

    async def receive(self) -> dict[str, Any]:
        """As pyvoy does: an empty piece whenever there is no other, until the client goes."""
        if self._events:
            return self._events.pop(0)
        return {"type": "http.disconnect" if self.is_gone else "http.request", "body": b""}

    async def send(self, event: Any) -> None:
        if self.is_gone:
            raise OSError("the client went away")
        self.sent.append(dict(event))

    def headers(self) -> dict[bytes, bytes]:
        """Of the answer, and its trailers."""
        return {name: value for event in self.sent for name, value in event.get("headers", ())}

    def status(self) -> int:
        return int(self.headers()[b"grpc-status"])


async def call(app: GrpcApp, client: Client, path: str = EMBED, **headers: str) -> Client:
    pairs = {**GRPC, **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        "type": "http",
        "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in pairs.items()],
    }
    await app(scope, client.receive, client.send)
    return client


@pytest.fixture
def limits() -> Limits:
    return LIMITS


@pytest.fixture
def app(service: Service) -> GrpcApp:
    return GrpcApp(service)


async def test_an_answer_has_one_message_and_its_status_in_the_trailers(app: GrpcApp) -> None:
    client = await call(app, Client(framed(MESSAGE)))
    start, body, trailers = client.sent
    assert (start["status"], start["trailers"]) == (200, True)
    assert dict(start["headers"])[b"grpc-accept-encoding"] == b"identity,deflate,gzip"
    assert pb.EmbedResponse.FromString(body["body"][5:]).batch_size == 1
    assert body["body"][:5] == framed(body["body"][5:])[:5]
    assert trailers["headers"] == [(b"grpc-status", b"0")]


@pytest.mark.parametrize(
    ("pieces", "headers", "code"),
    [
        ([framed(MESSAGE)[:3], framed(MESSAGE)[3:9], framed(MESSAGE)[9:]], {}, "OK"),
        ([framed(MESSAGE), b""], {}, "OK"),
        ([framed(MESSAGE) * 2], {}, "OK"),
        ([framed(MESSAGE)], {"grpc_timeout": "5S"}, "OK"),
        ([b""], {}, "UNIMPLEMENTED"),
        ([framed(MESSAGE)[:-1]], {}, "INTERNAL"),
        ([framed(MESSAGE)], {"grpc_timeout": "soon"}, "INTERNAL"),
        ([framed(MESSAGE)], {"grpc_timeout": "0m"}, "DEADLINE_EXCEEDED"),
        ([framed(MESSAGE)], {"grpc_encoding": "br"}, "UNIMPLEMENTED"),
        ([framed(bytes(10_001))], {}, "RESOURCE_EXHAUSTED"),
        ([framed(b"\0")], {}, "INVALID_ARGUMENT"),
        ([b"\1" + framed(gzip.compress(MESSAGE))[1:]], {"grpc_encoding": "gzip"}, "OK"),
        (
            [b"\1" + framed(gzip.compress(bytes(1 << 20)))[1:]],
            {"grpc_encoding": "gzip"},
            "RESOURCE_EXHAUSTED",
        ),
    ],
)
@pytest.mark.parametrize("path", [EMBED, STREAM])
async def test_bodies_are_read_as_grpc_frames_them(
    app: GrpcApp, path: str, pieces: list[bytes], headers: dict[str, str], code: str
) -> None:
    client = await call(app, Client(*pieces), path, **headers)
    if (
        path == STREAM
        and code in ("INVALID_ARGUMENT", "UNIMPLEMENTED")
        and "br" not in str(headers)
    ):
        code = "OK"  # in its place, or no message at all
    assert client.status() == grpc.StatusCode[code].value[0], client.headers()


async def test_what_is_no_grpc_is_an_unsupported_media_type(app: GrpcApp) -> None:
    for content_type in ("application/json", "application/grpc-web", ""):
        client = await call(app, Client(b"{}"), content_type=content_type)
        assert [event.get("status") for event in client.sent] == [415, None]
    client = await call(app, Client(framed(MESSAGE)), content_type="application/grpc+proto")
    assert client.status() == 0


async def test_an_unforeseen_error_is_logged_and_answered_in_general(
    app: GrpcApp, service: Service, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("secret of the server")

    monkeypatch.setattr(service, "enqueue", fail)
    client = await call(app, Client(framed(MESSAGE)))
    assert client.status() == grpc.StatusCode.INTERNAL.value[0]
    assert b"secret" not in client.headers()[b"grpc-message"]
    assert "ZeroDivisionError: secret of the server" in caplog.text
    assert service.metrics.protocols["grpc"].outcomes == {"INTERNAL": 1}


@pytest.fixture
def held(engine: FakeEngine, executor: ThreadPoolExecutor) -> Iterator[Service]:
    engine.hold()
    yield make_service(engine, executor=executor, limits=IN_THREAD)
    engine.release()


@pytest.mark.parametrize("path", [EMBED, STREAM])
async def test_a_client_that_goes_while_it_waits_costs_no_lookup(
    held: Service, engine: FakeEngine, path: str
) -> None:
    app = GrpcApp(held)
    running = asyncio.create_task(call(app, Client(framed(MESSAGE))))
    await until(lambda: engine.lookups)
    client = Client(framed(MESSAGE))
    waiting = asyncio.create_task(call(app, client, path))
    await until(lambda: held.metrics.models["shop"].queued_requests == 1)
    client.is_gone = True
    await until(lambda: held.metrics.protocols["grpc"].outcomes == {"CANCELLED": 1})
    await waiting
    engine.release()
    assert (await running).status() == 0
    assert (client.sent, len(engine.lookups), app.open_calls) == ([], 1, set())


async def test_a_drained_server_answers_what_it_took_and_refuses_the_rest(
    held: Service, engine: FakeEngine
) -> None:
    app = GrpcApp(held)
    calls = [asyncio.create_task(call(app, Client(framed(MESSAGE)), p)) for p in (EMBED, STREAM)]
    await until(lambda: engine.lookups)
    app.drain()
    finishing = asyncio.create_task(app.finish(10))
    late = await call(app, Client(framed(MESSAGE)))
    assert late.status() == grpc.StatusCode.UNAVAILABLE.value[0]
    assert late.headers()[b"retry-after"] == b"1"
    engine.release()
    assert [(await one).status() for one in calls] == [0, 0]
    await finishing


async def test_what_is_not_answered_in_time_is_ended_as_unavailable(
    held: Service, engine: FakeEngine
) -> None:
    app = GrpcApp(held)
    client = Client(framed(MESSAGE))
    running = asyncio.create_task(call(app, client))
    watch = Client(framed(b""))
    watching = asyncio.create_task(call(app, watch, "/grpc.health.v1.Health/Watch"))
    await until(lambda: engine.lookups and watch.sent)
    app.drain()
    await app.finish(0.01)
    await asyncio.gather(running, watching)
    assert client.status() == watch.status() == grpc.StatusCode.UNAVAILABLE.value[0]


async def test_calls_that_no_task_waits_for_are_ended_once_as_well(
    held: Service, engine: FakeEngine
) -> None:
    app = GrpcApp(held, waits_for_answers=False)
    outcomes = held.metrics.protocols["grpc"].outcomes
    running, queued, gone = [await call(app, Client(framed(MESSAGE))) for _ in range(3)]
    await until(lambda: engine.lookups)
    gone.is_gone = True
    await until(lambda: outcomes == {"CANCELLED": 1})
    app.drain()
    await app.finish(0.01)
    assert running.status() == queued.status() == grpc.StatusCode.UNAVAILABLE.value[0]
    assert (outcomes, app.open_calls) == ({"CANCELLED": 1, "UNAVAILABLE": 2}, set())
    engine.release()
    await until(lambda: held.metrics.models["shop"].queued_requests == 0)
    assert [len(one.sent) for one in (running, queued, gone)] == [2, 2, 0]


@pytest.fixture
def remote(envoy: Envoy) -> Iterator[RemoteEngine]:
    engine = reset(envoy, IN_THREAD)
    yield engine
    engine.release()


@pytest.fixture
async def channel(remote: RemoteEngine) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(remote.envoy.target, options=OWN_CONNECTION) as channel:
        yield channel


async def test_a_client_of_many_calls_at_a_time_loses_none(channel: grpc.aio.Channel) -> None:
    embed = channel.unary_unary(EMBED)
    expected = await embed(MESSAGE)
    left = iter(range(CALLS))

    async def one_after_the_other() -> int:
        answered = 0
        for _ in left:
            assert await embed(MESSAGE) == expected
            answered += 1
        return answered

    counts = await asyncio.gather(*[one_after_the_other() for _ in range(CONCURRENT)])
    assert sum(counts) == CALLS


@pytest.mark.skipif(shutil.which("h2load") is None, reason="h2load is not installed")
@pytest.mark.parametrize(("connections", "streams"), [(8, 8), (64, 1)])
def test_h2load_loses_no_call(
    remote: RemoteEngine, tmp_path: Path, connections: int, streams: int
) -> None:
    (tmp_path / "body").write_bytes(framed(MESSAGE))
    headers = [part for name, value in GRPC.items() for part in ("-H", f"{name}: {value}")]
    done = subprocess.run(
        ["h2load", f"-n{CALLS}", f"-c{connections}", f"-m{streams}", "-d", tmp_path / "body"]
        + [*headers, f"http://{remote.envoy.target}{EMBED}"],
        capture_output=True,
        text=True,
        timeout=25,
    )
    assert f"{CALLS} succeeded, 0 failed, 0 errored, 0 timeout" in done.stdout
    assert remote.envoy.ask("outcomes") == {"OK": CALLS}


async def test_a_large_stream_is_held_back_and_answered_whole(
    channel: grpc.aio.Channel, remote: RemoteEngine
) -> None:
    """42 MB of requests, more than the window and HTTP/2's, behind one that is not answered."""
    refused = pb.EmbedRequest(
        model="shoes", keys=["user"], lengths=[0], weights_bytes=bytes(70_000)
    )
    count = 600
    remote.hold()
    stub = EmbeddingServiceStub(channel)
    stream = stub.EmbedStream(refused if i else REQUEST for i in range(count))
    await until(lambda: sum(remote.envoy.ask("outcomes").values()) == WINDOW_REQUESTS_MAX - 1)
    await asyncio.sleep(0.1)
    assert sum(remote.envoy.ask("outcomes").values()) == WINDOW_REQUESTS_MAX - 1
    remote.release()
    assert [bool(a.error.code) async for a in stream] == [False, *[True] * (count - 1)]


async def test_many_calls_that_time_out_do_not_cost_the_connection_its_others(
    channel: grpc.aio.Channel, remote: RemoteEngine
) -> None:
    """To Envoy a client that cancels most of its calls is an attack, which an overload is not."""
    remote.hold()
    embed = channel.unary_unary(EMBED)
    patient = asyncio.ensure_future(embed(MESSAGE))
    await until(lambda: remote.lookups)
    calls = [embed(MESSAGE, timeout=0.05) for _ in range(600)]
    codes = [await call.code() for call in calls]
    assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}
    remote.release()
    assert pb.EmbedResponse.FromString(await patient).batch_size == 1


async def test_a_stream_ends_at_its_deadline(
    channel: grpc.aio.Channel, remote: RemoteEngine
) -> None:
    remote.hold()
    stream = EmbeddingServiceStub(channel).EmbedStream(iter([REQUEST]), timeout=0.1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: remote.envoy.ask("open_calls") == 0)


async def test_all_who_watch_health_are_told(
    channel: grpc.aio.Channel, remote: RemoteEngine
) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    response = health_pb2.HealthCheckResponse
    watches = [health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME)) for _ in range(3)]
    unknown = health.Watch(health_pb2.HealthCheckRequest(service="shoes"))
    assert (await unknown.read()).status == response.SERVICE_UNKNOWN
    assert [(await one.read()).status for one in watches] == [response.SERVING] * 3
    watches.pop().cancel()
    remote.envoy.ask("set_serving", False)
    assert [(await one.read()).status for one in watches] == [response.NOT_SERVING] * 2
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health.Check(health_pb2.HealthCheckRequest(service="shoes"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    for one in (unknown, *watches):
        one.cancel()
