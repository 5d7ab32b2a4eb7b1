"""POST /embed through uvicorn on a loopback port: what only a real connection shows."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest
from server.fake_engine import Bags, FakeEngine
from server.live import IN_THREAD, Live, live_server
from server.waiting import until

from embedserve.config import Limits

BAGS: Bags = {"user": [[1, 2]]}
BODY = json.dumps({"features": BAGS}).encode()
HEAD = b"POST /embed HTTP/1.1\r\nHost: test\r\n"
SENT = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


@pytest.fixture
async def live(engine: FakeEngine) -> AsyncIterator[Live]:
    limits = Limits(body_bytes_max=100_000, request_text_bytes_max=80_000, inline_bytes_max=0)
    async with live_server(engine, limits=limits) as live:
        yield live


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """(status, body) of one HTTP answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length")
    )
    return int(head.split()[1]), await reader.readexactly(length)


async def test_requests_share_one_connection(live: Live, engine: FakeEngine) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", live.http_port)
    for _ in range(3):
        writer.write(SENT)
        status, body = await read_answer(reader)
        assert status == 200
        assert np.array_equal(
            np.array(json.loads(body)["values"], np.float32), engine.expected(BAGS)
        )
    writer.close()


async def test_pipelined_requests_are_answered_in_order(live: Live) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", live.http_port)
    bad = HEAD + b"Content-Length: 1\r\n\r\n{"
    writer.write(SENT + bad + SENT)
    assert [(await read_answer(reader))[0] for _ in range(3)] == [200, 400, 200]
    writer.close()


async def test_concurrent_requests_form_batches(live: Live, engine: FakeEngine) -> None:
    engine.hold()
    posts = [asyncio.create_task(live.http.post("/embed", content=BODY)) for _ in range(12)]
    await until(lambda: engine.lookups and engine.lookups[0].batch_size + live.queued() == 12)
    engine.release()
    assert {answer.status_code for answer in await asyncio.gather(*posts)} == {200}
    assert len(engine.lookups) <= 2


async def test_a_chunked_body_is_one_body(live: Live) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for i in range(len(BODY)):
            yield BODY[i : i + 1]

    answer = await live.http.post("/embed", content=chunks())
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("application/json", r"80000 \(--request-text-bytes-max\)"),
        ("application/x-protobuf", r"100000 \(--body-bytes-max\)"),
    ],
)
@pytest.mark.parametrize(
    ("is_chunked", "said"), [(False, "400000"), (True, r"at least (8|9|1\d)\d{4}")]
)
async def test_an_oversized_body_is_refused_and_the_server_goes_on(
    live: Live, is_chunked: bool, said: str, kind: str, limit: str
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield bytes(10_000)

    content = chunks() if is_chunked else bytes(400_000)
    headers = {"Content-Type": kind}
    answer = await live.http.post("/embed", content=content, headers=headers)
    assert answer.status_code == 413
    error = answer.json()["error"]
    assert error["field"] == "body"
    assert re.fullmatch(f"body has {said} bytes, the limit is {limit}", error["message"])
    assert (await live.http.post("/embed", content=BODY)).status_code == 200


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_other_methods_keep_the_connection_usable(live: Live, method: str) -> None:
    for _ in range(2):
        answer = await live.http.request(method, "/embed")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert (answer.content == b"") == (method == "HEAD")
    assert (await live.http.post("/embed", content=BODY)).status_code == 200


async def test_a_client_that_hangs_up_leaves_the_queue(live: Live, engine: FakeEngine) -> None:
    engine.hold()
    running = asyncio.create_task(live.http.post("/embed", content=BODY))
    await until(lambda: engine.lookups)
    _, writer = await asyncio.open_connection("127.0.0.1", live.http_port)
    writer.write(SENT)
    await until(lambda: live.queued() == 1)
    writer.close()
    await until(lambda: live.outcomes("rest") == {"CANCELLED": 1})
    engine.release()
    assert (await running).status_code == 200
    assert (await live.http.post("/embed", content=BODY)).status_code == 200
    assert [lookup.batch_size for lookup in engine.lookups] == [1, 1]


async def test_a_client_that_hangs_up_while_its_request_waits_for_company_costs_no_lookup(
    engine: FakeEngine,
) -> None:
    async with live_server(engine, limits=Limits(delay_ms_max=500)) as live:
        _, writer = await asyncio.open_connection("127.0.0.1", live.http_port)
        writer.write(SENT)
        await until(lambda: live.queued() == 1)
        writer.close()
        await until(lambda: live.outcomes("rest") == {"CANCELLED": 1})
        await until(lambda: live.queued() == 0)
    assert engine.lookups == []


async def test_a_client_that_hangs_up_within_its_body_is_forgotten(live: Live) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", live.http_port)
    writer.write(SENT[:-5])
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.close()
    await until(lambda: live.outcomes("rest") == {"CANCELLED": 1})


async def test_a_timeout_that_passes_in_the_queue_is_answered_504(
    live: Live, engine: FakeEngine
) -> None:
    engine.hold()
    running = asyncio.create_task(live.http.post("/embed", content=BODY))
    await until(lambda: engine.lookups)
    headers = {"X-Timeout-Ms": "300"}
    late = asyncio.create_task(live.http.post("/embed", content=BODY, headers=headers))
    await until(lambda: live.queued() == 1)
    await asyncio.sleep(0.3)
    engine.release()
    assert (await running).status_code == 200
    answer = await late
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "DEADLINE_EXCEEDED")
    assert len(engine.lookups) == 1


async def test_a_full_queue_is_answered_429_with_retry_after(engine: FakeEngine) -> None:
    limits = Limits(inline_bytes_max=0, queue_examples_max=1)
    async with live_server(engine, limits=limits) as live:
        engine.hold()
        running = asyncio.create_task(live.http.post("/embed", content=BODY))
        await until(lambda: engine.lookups)
        waiting = asyncio.create_task(live.http.post("/embed", content=BODY))
        await until(lambda: live.queued() == 1)
        refused = await live.http.post("/embed", content=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "RESOURCE_EXHAUSTED"
        engine.release()
        assert [(await running).status_code, (await waiting).status_code] == [200, 200]


async def test_health_and_metrics_answer_while_a_batch_runs(live: Live, engine: FakeEngine) -> None:
    engine.hold()
    running = asyncio.create_task(live.http.post("/embed", content=BODY))
    await until(lambda: engine.lookups)
    assert (await live.http.get("/health/ready")).status_code == 200
    assert "embedserve_queue_requests" in (await live.http.get("/metrics")).text
    engine.release()
    await running


@pytest.mark.parametrize("path", ["/models/a%2Fb/embed", "/models/%E6%98%A0/embed", "/nothing"])
async def test_unknown_names_and_paths_are_answered_404(live: Live, path: str) -> None:
    answer = await live.http.post(path, content=BODY)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "NOT_FOUND"


async def test_answers_larger_than_any_buffer_arrive_whole(engine: FakeEngine) -> None:
    bags: Bags = {"user": [[i % 7] for i in range(20_000)]}
    async with live_server(engine, limits=IN_THREAD) as live:
        answer = await live.http.post("/embed", json={"features": bags}, timeout=httpx.Timeout(30))
        values = np.array(answer.json()["values"], np.float32)
    assert np.array_equal(values[:, :4], engine.tables["t_user"][np.arange(20_000) % 7])
