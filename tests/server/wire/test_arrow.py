"""Tests of POST /embed in Arrow: responses equal those in protobuf and JSON; errors are JSON."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from server.arrow_streams import (
    ARROW,
    columns_of,
    message_of,
    metadata_in,
    read_table,
    stream_of,
    vectors,
)
from server.fake_engine import Bags, FakeEngine, Weights
from server.fake_models import ruled_info, unpooled_info
from server.live import JSON, PROTOBUF, Live, live_server

from embedserve.config import Limits
from embedserve_proto import embedding_pb2 as pb

BAGS: Bags = {"tag": [[1], [2, 3], []], "user": [[4], [], [6]]}
WEIGHTS: Weights = {"tag": [[0.5], [1.0, -2.0], []]}
COLUMNS = {"user": slice(0, 4), "movie": slice(4, 7), "tag": slice(7, 9)}


@pytest.fixture
async def live(engine: FakeEngine) -> AsyncIterator[Live]:
    limits = Limits(body_bytes_max=20_000, request_examples_max=8)
    others = FakeEngine(unpooled_info()), FakeEngine(ruled_info())
    async with live_server(engine, *others, limits=limits) as live:
        yield live


async def post_arrow(
    live: Live, body: bytes, path: str = "/embed", **headers: str
) -> httpx.Response:
    return await live.http.post(path, content=body, headers={"content-type": ARROW, **headers})


async def by_protobuf(live: Live, path: str, request: pb.EmbedRequest) -> pb.EmbedResponse:
    headers = {"content-type": PROTOBUF}
    response = await live.http.post(path, content=request.SerializeToString(), headers=headers)
    assert response.status_code == 200, response.text
    return pb.EmbedResponse.FromString(response.content)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("rows", [1, 3])
async def test_arrow_response_equals_the_protobuf_response(
    live: Live, engine: FakeEngine, rows: int, weights: Weights | None
) -> None:
    body = stream_of(columns_of(BAGS, weights), rows=rows)
    expected = await by_protobuf(live, "/embed", message_of(BAGS, weights))
    for path in ("/embed", "/models/shop/embed"):
        answer = await post_arrow(live, body, path)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == ARROW
        assert int(answer.headers["content-length"]) == len(answer.content)
        table = read_table(answer.content)
        assert vectors(table["values"]).tobytes() == expected.values
        assert metadata_in(table)["keys"] == list(expected.keys)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
async def test_selected_keys_become_columns(live: Live, engine: FakeEngine, dtype: str) -> None:
    options = {"columns": "keys", "output_keys": '["tag", "user"]', "output_dtype": dtype}
    table = read_table(
        (await post_arrow(live, stream_of(columns_of(BAGS), options=options))).content
    )
    assert table.column_names == ["user", "tag"]
    expected = engine.expected(BAGS).astype(dtype)
    for key in ("user", "tag"):
        assert np.array_equal(vectors(table[key]), expected[:, COLUMNS[key]])


@pytest.mark.parametrize("accept", [JSON, PROTOBUF, ARROW])
async def test_any_response_format_works_with_any_request_format(
    live: Live, engine: FakeEngine, accept: str
) -> None:
    bodies = {
        ARROW: stream_of(columns_of(BAGS)),
        PROTOBUF: message_of(BAGS).SerializeToString(),
        JSON: None,
    }
    for kind, body in bodies.items():
        headers = {"content-type": kind, "accept": accept}
        sent: dict[str, Any] = {"json": {"features": BAGS}} if body is None else {"content": body}
        response = await live.http.post("/embed", headers=headers, **sent)
        assert (response.status_code, response.headers["content-type"]) == (200, accept)
        if accept == JSON:
            values = np.array(response.json()["values"], np.float32)
        elif accept == PROTOBUF:
            message = pb.EmbedResponse.FromString(response.content)
            values = np.frombuffer(message.values, "<f4").reshape(3, -1)
        else:
            values = vectors(read_table(response.content)["values"])
        assert np.array_equal(values, engine.expected(BAGS))


async def test_arrow_is_described_in_openapi(live: Live) -> None:
    described = (await live.http.get("/openapi.json")).json()
    for path in ("/embed", "/models/{model}/embed"):
        post = described["paths"][path]["post"]
        assert ARROW in post["requestBody"]["content"]
        assert ARROW in post["responses"]["200"]["content"]
