"""Tests that equal requests have equal responses over every protocol and with any chunking."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
from server.fake_engine import FakeEngine, model_info
from server.http2_client import http2_client
from server.live import Live, make_pipeline, serving
from server.raw_http import read_response
from server.waiting import WAIT_S_MAX

BODY = b'{"features": {"user": [[1]]}}'
Fields = list[tuple[str, str]]
KEYS = [f"user-{i}" for i in range(12)]


@dataclass(frozen=True)
class Case:
    """A request, the status of its response, and words of the response's body."""

    path: str
    fields: tuple[tuple[str, str], ...]
    status: int
    words: str = ""


CASES = {
    "plain": Case("/embed", (), 200),
    "a version, percent-encoded": Case("/models/shop%401/embed", (), 200),
    "a path, percent-encoded": Case("/m%6fdels/shop/embed", (), 200),
    "a slash, percent-encoded": Case("/models%2Fshop%2Fembed", (), 200),
    "a slash in a name": Case("/models/sh%2Fop/embed", (), 404),
    "a query": Case("/models/shop/embed?a=b", (), 200),
    "two routing keys": Case(
        "/embed", (("x-routing-key", "a"), ("x-routing-key", "b")), 400, "X-Routing-Key"
    ),
    "two timeouts": Case("/embed", (("x-timeout-ms", "5000"),) * 2, 400, "X-Timeout-Ms"),
    "two lengths of JSON": Case(
        "/v2/models/shop/infer", (("inference-header-content-length", "2"),) * 2, 400, "several"
    ),
    "a fragment": Case("/models/shop/embed#x", (), 400, "percent-encode it"),
    "a fragment in a name": Case("/models/shop#x/embed", (), 400, "percent-encode it"),
    "a slash at the end": Case("/models/", (), 404),
    "a slash after a lookup": Case("/embed/", (), 404),
    "two slashes": Case("//embed", (), 404),
    "a model below another path": Case("/tables/shop/embed", (), 404),
}


@pytest.fixture
async def live() -> AsyncIterator[Live]:
    """Serves version 1 for 60 percent of the requests, and version 2 for the others."""
    infos = [model_info(), model_info()]
    infos = [
        replace(
            info,
            manifest=replace(info.manifest, version=number),
            served_name=f"shop@{number}",
        )
        for number, info in enumerate(infos, 1)
    ]
    engines = [FakeEngine(info, seed=info.version) for info in infos]
    with ThreadPoolExecutor(1) as executor:
        pipeline = make_pipeline(*engines, executor=executor, default_model="shop")
        pipeline.models.set_share("shop@2", 40.0)
        async with serving(pipeline) as live:
            yield live


async def over_http1(live: Live, path: str, fields: Fields, way: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", live.http_port)
    lines = [f"{name}: {value}" for name, value in fields]
    if way == "chunked":
        lines.append("connection: close")  # such requests match no header template
    head = [f"POST {path} HTTP/1.1", "host: localhost", *lines, f"content-length: {len(BODY)}"]
    data = "\r\n".join([*head, "", ""]).encode() + BODY
    try:
        for _ in range(1 if way == "chunked" else 2):  # the second time its headers are cached
            for piece in [data[i : i + 1] for i in range(len(data))] if way == "cut" else [data]:
                writer.write(piece)
                await writer.drain()
            status, headers, body = await asyncio.wait_for(read_response(reader), WAIT_S_MAX)
            if b"connection" in headers:
                break
    finally:
        writer.close()
    return status, body


async def over_http2(live: Live, path: str, fields: Fields, way: str) -> tuple[int, bytes]:
    async with http2_client(live.http_port) as client:
        answer = await client.request("POST", path, BODY, fields)
    return answer.status, answer.body


WAYS = {"http1": over_http1, "cut": over_http1, "chunked": over_http1, "http2": over_http2}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_request_has_the_same_status_over_every_framing(live: Live, case: Case) -> None:
    for way, send_request in WAYS.items():
        status, body = await send_request(live, case.path, list(case.fields), way)
        assert (way, status) == (way, case.status)
        assert case.words.encode() in body
        assert b"localhost" not in body


async def test_routing_key_selects_the_same_version_over_every_framing(live: Live) -> None:
    """Checks that blanks around a value are not part of it, whatever the chunks and the cache."""
    versions = set()
    for key in KEYS:
        bodies = set()
        for padding in ("", "  ", " \t"):
            # The headers have one length, so that the headers without padding are the template of
            # the others.
            field = ("x-routing-key", key + padding)
            longer = ("x-routing-key", key + "-" * len(padding))
            for way in ("http1", "cut", "chunked"):
                await over_http1(live, "/embed", [longer], "http1")
                status, body = await over_http1(live, "/embed", [field], way)
                assert status == 200
                bodies.add(body)
        status, body = await over_http2(live, "/embed", [("x-routing-key", key)], "")
        assert (status, len(bodies | {body})) == (200, 1)
        versions |= bodies
    assert len(versions) == 2


async def test_redirect_does_not_repeat_the_host(live: Live) -> None:
    response = await live.http.get("/models/", headers={"Host": "evil.example"})
    assert response.status_code == 404
    assert "location" not in response.headers
