"""REST over HTTP/2 with prior knowledge, on both ports: answered as over HTTP/1."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import numpy as np
import pytest
from server.arrow_streams import ARROW, columns_of, stream_of
from server.fake_engine import Bags, FakeEngine
from server.http2_client import Http2Client, http2_client
from server.live import PROTOBUF, Live, live_server
from server.waiting import until

from embedserve.config import Limits
from embedserve_proto import embedding_pb2 as pb

BODY = b'{"features": {"user": [[1, 2]], "movie": [[3]]}}'
MESSAGE = pb.EmbedRequest(keys=["user"], ids=[1, 2], lengths=[2]).SerializeToString()
LIMITS = Limits(body_bytes_max=2_000_000, inline_bytes_max=0)


@pytest.fixture
async def live(engine: FakeEngine) -> AsyncIterator[Live]:
    async with live_server(engine, limits=LIMITS) as live:
        yield live


@pytest.fixture(params=["http", "grpc"])
async def client(live: Live, request: pytest.FixtureRequest) -> AsyncIterator[Http2Client]:
    grpc_port = int(live.grpc_target.rpartition(":")[2])
    async with http2_client(live.http_port if request.param == "http" else grpc_port) as client:
        yield client


STREAM = stream_of(columns_of({"user": [[1], [2, 3]]}))
CASES: dict[str, tuple[str, str, bytes, dict[str, str]]] = {
    "json": ("POST", "/embed", BODY, {}),
    "named model": ("POST", "/models/shop/embed", BODY, {}),
    "query": ("POST", "/embed?a=1", BODY, {}),
    "protobuf": ("POST", "/embed", MESSAGE, {"content-type": PROTOBUF}),
    "protobuf, answered as json": (
        "POST",
        "/embed",
        MESSAGE,
        {"content-type": PROTOBUF, "accept": "application/json"},
    ),
    "arrow": ("POST", "/embed", STREAM, {"content-type": ARROW}),
    "not arrow": ("POST", "/embed", b"{", {"content-type": ARROW}),
    "nothing": ("POST", "/embed", b"", {}),
    "not json": ("POST", "/embed", b"{", {}),
    "no row": ("POST", "/embed", b'{"features": {"user": [[99]]}}', {}),
    "unknown model": ("POST", "/models/nobody/embed", BODY, {}),
    "unknown path": ("POST", "/nothing", BODY, {}),
    "compressed": ("POST", "/embed", BODY, {"content-encoding": "gzip"}),
    "bad timeout": ("POST", "/embed", BODY, {"x-timeout-ms": "soon"}),
    "other method": ("GET", "/embed", b"", {}),
    "models": ("GET", "/models", b"", {}),
    "one model": ("GET", "/models/shop", b"", {}),
    "ready": ("GET", "/health/ready", b"", {}),
    "openapi": ("GET", "/openapi.json", b"", {}),
    "too large": ("POST", "/embed", b" " * 2_000_001, {}),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_request_is_answered_as_over_http1(
    live: Live, client: Http2Client, name: str
) -> None:
    method, path, body, headers = CASES[name]
    # httpx adds headers of its own, which decide nothing but the form of the answer.
    plain = {"accept": "*/*", "x-request-id": "same", **headers}
    over_http1 = await live.http.request(method, path, content=body, headers=plain)
    length = {"content-length": str(len(body))} if body else {}
    answer = await client.request(method, path, body, {**plain, **length})
    assert (answer.status, answer.body, answer.reset) == (
        over_http1.status_code,
        over_http1.content,
        None,
    )
    of_http1 = {"connection": "close"}  # what is refused by its head ends the connection
    assert answer.headers.items() == over_http1.headers.items() - of_http1.items()
    outcomes = live.outcomes("rest")
    assert all(count == 2 for count in outcomes.values()), outcomes


async def test_requests_of_one_connection_share_a_batch(
    live: Live, client: Http2Client, engine: FakeEngine
) -> None:
    engine.hold()
    first = client.post("/embed", BODY)
    await until(lambda: engine.lookups)
    others = [client.post("/embed", BODY) for _ in range(10)]
    await until(lambda: live.queued() == 10)
    engine.release()
    answers = [await client.answer(number) for number in (first, *others)]
    assert {(one.status, one.body) for one in answers} == {(200, answers[0].body)}
    assert [lookup.batch_size for lookup in engine.lookups] == [1, 10]


async def test_a_large_request_and_answer_arrive_whole(
    client: Http2Client, engine: FakeEngine
) -> None:
    bags: Bags = {"user": [[i % 7] for i in range(50_000)]}
    body = json.dumps({"features": bags}).encode().ljust(1_500_000)
    answer = await client.request("POST", "/embed", body, {"accept": PROTOBUF})
    assert answer.status == 200
    values = np.frombuffer(pb.EmbedResponse.FromString(answer.body).values, "<f4")
    expected = engine.tables["t_user"][np.arange(50_000) % 7]
    assert np.array_equal(values.reshape(50_000, -1)[:, :4], expected)


async def test_a_head_that_is_too_large_is_answered_431(live: Live, client: Http2Client) -> None:
    headers = {f"x-{i}": "a" * 1000 for i in range(17)}
    answer = await client.request("POST", "/embed", BODY, headers)
    assert answer.status == 431
    assert json.loads(answer.body)["error"]["code"] == "RESOURCE_EXHAUSTED"
    assert live.outcomes("rest") == {"RESOURCE_EXHAUSTED": 1}
