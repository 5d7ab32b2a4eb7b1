"""Health, models, metrics, the OpenAPI pages, and that they all fail in one shape."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import httpx
import jsonschema
import pytest
from server.fake_engine import FakeEngine
from server.fake_models import info_of, ruled_info, unpooled_info
from server.live import JSON, make_exchange
from server.openapi import validate

from embedserve.api.management import management_app
from embedserve.errors import DRAINING
from embedserve.exchange import Exchange
from embedserve.types import ComingVersion
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.plan import Plan, Shard, TablePlan


async def schema(rest: httpx.AsyncClient) -> dict[str, Any]:
    described: dict[str, Any] = (await rest.get("/openapi.json")).json()
    return described


async def test_live_and_ready(rest: httpx.AsyncClient, exchange: Exchange) -> None:
    assert (await rest.get("/health/live")).json() == {"status": "live"}
    assert (await rest.get("/health/ready")).json() == {"status": "ready"}
    exchange.models.not_ready = DRAINING
    assert (await rest.get("/health/live")).status_code == 200
    answer = await rest.get("/health/ready")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert answer.json()["error"]["code"] == "UNAVAILABLE"


async def test_models_are_described(rest: httpx.AsyncClient) -> None:
    listed = (await rest.get("/models")).json()
    assert listed["default_model"] == "shop"
    assert [model["model"] for model in listed["models"]] == ["shop"]
    shop = (await rest.get("/models/shop")).json()
    assert shop == listed["models"][0]
    assert shop["length_per_key"] == [4, 3, 2]
    assert shop["tables"][0] == {
        "name": "t_user",
        "num_embeddings": 7,
        "embedding_dim": 4,
        "pooling": "sum",
        "dtype": "float32",
        "features": ["user"],
        "sharding": "table_wise",
        "ids": {"rule": "rows", "unknown": "error"},
    }
    assert not shop["unpooled"]


async def test_the_plan_tells_which_rank_holds_what(executor: ThreadPoolExecutor) -> None:
    user, movie = [TableSpec(name, 7, 12, (name,), "sum", "int8") for name in ("user", "movie")]
    tables = {
        "user": TablePlan("column_wise", (Shard(1, 0, 7, 0, 4), Shard(0, 0, 7, 4, 8))),
        "movie": TablePlan("data_parallel", (Shard(0, 0, 7, 0, 12), Shard(1, 0, 7, 0, 12))),
    }
    info = replace(info_of("films", [user, movie], {}), plan=Plan(2, tables, {}))
    app = management_app(make_exchange(FakeEngine(info), executor=executor))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        told = (await client.get("http://test/models/films/plan")).json()
        model = (await client.get("http://test/models/films")).json()
        validate(told, "Plan", (await client.get("http://test/openapi.json")).json())
        assert (await client.get("http://test/models/shoes/plan")).status_code == 404
    by_columns, copied = told["tables"]
    assert (told["version"], told["ranks"], by_columns["sharding"]) == (7, 2, "column_wise")
    first, second = by_columns["shards"]
    assert first == {
        **{"rank": 1, "row_offset": 0, "row_count": 7, "col_offset": 0, "col_count": 4},
        "bytes": 7 * (4 + 4),  # a scale and bias for each row
    }
    assert (second["rank"], second["col_offset"], second["bytes"]) == (0, 4, 7 * (4 + 8))
    assert [shard["rank"] for shard in copied["shards"]] == [0]  # no other rank is asked of it
    assert model["bytes_per_rank"] == [7 * 12 + 7 * 16, 7 * 8]


async def test_a_version_that_is_to_come_is_shown(
    rest: httpx.AsyncClient, exchange: Exchange
) -> None:
    assert "next" not in (await rest.get("/models/shop")).json()
    coming = ComingVersion(
        8, "failed", "its goldens are answered otherwise", "2026-11-22T18:00:00Z"
    )
    exchange.models.coming["shop"] = coming
    listed = (await rest.get("/models")).json()
    assert listed["models"][0]["version"] == 7
    assert listed["models"][0]["next"] == asdict(coming)
    validate(listed, "Models", await schema(rest))


async def test_tables_are_described_with_their_id_rules(executor: ThreadPoolExecutor) -> None:
    engines = FakeEngine(ruled_info()), FakeEngine(unpooled_info())
    app = management_app(make_exchange(*engines, executor=executor))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        listed = (await client.get("http://test/models")).json()
        validate(listed, "Models", (await client.get("http://test/openapi.json")).json())
    ruled, sequence = listed["models"]
    assert {table["name"]: table["ids"] for table in ruled["tables"]} == {
        "t_user": {"rule": "map", "id_type": "int64", "entries": 5, "unknown": "skip"},
        "t_movie": {"rule": "rows", "unknown": "row", "default_row": 3},
        "t_tag": {
            "rule": "map",
            "id_type": "string",
            "entries": 4,
            "unknown": "skip",
            "examples": ["drama", "comédie"],
        },
        "t_day": {"rule": "modulo", "modulus": 4, "offset": 2},
        "t_shelf": {"rule": "map", "id_type": "int64", "entries": 3, "unknown": "error"},
    }
    assert (ruled["unpooled"], sequence["unpooled"]) == (False, True)
    assert {table["pooling"] for table in sequence["tables"]} == {"none"}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/models/shoes", 404, "NOT_FOUND"),
        ("GET", "/nothing", 404, "NOT_FOUND"),
        ("POST", "/models", 405, "INVALID_ARGUMENT"),
        ("DELETE", "/models/shop", 405, "INVALID_ARGUMENT"),
    ],
)
async def test_every_refusal_has_the_shape_of_the_embed_routes(
    rest: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    answer = await rest.request(method, path)
    assert (answer.status_code, answer.headers["content-type"]) == (status, JSON)
    assert answer.json()["error"]["code"] == code
    assert ("allow" in answer.headers) == (status == 405)
    validate(answer.json(), "Error", await schema(rest))


async def test_every_reference_of_the_openapi_document_has_its_schema(
    rest: httpx.AsyncClient,
) -> None:
    answer = await rest.get("/openapi.json")
    described = answer.json()
    assert described["openapi"].startswith("3.1")
    named = set(re.findall(r'"#/components/schemas/(\w+)"', answer.text))
    assert {"EmbedRequest", "EmbedResponse", "Error"} <= named
    assert named <= described["components"]["schemas"].keys()
    for one in described["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(one)
    for path in ("/embed", "/models/{model}/embed"):
        assert described["paths"][path].keys() == {"post"}
    named_in_path = [
        p["name"] for p in described["paths"]["/models/{model}/embed"]["post"]["parameters"]
    ]
    assert named_in_path == ["model", "X-Timeout-Ms"]


async def test_requests_and_answers_are_what_the_openapi_document_says(
    rest: httpx.AsyncClient,
) -> None:
    described = await schema(rest)
    for request in (
        {"features": {"user": [[1, 2], []]}},
        {"features": {"user": [1]}, "weights": {"user": [0.5]}},
    ):
        validate(request, "EmbedRequest", described)
        answer = await rest.post("/embed", json=request)
        assert answer.status_code == 200
        validate(answer.json(), "EmbedResponse", described)
    validate({"features": {"title": ["Heat"], "user": [[7]]}}, "EmbedRequest", described)
    for bad in (
        {"features": {"user": [1.5]}},
        {"features": {"user": [1, "a"]}},
        {},
        {"features": {}, "more": 1},
    ):
        with pytest.raises(jsonschema.ValidationError):
            validate(bad, "EmbedRequest", described)
        validate((await rest.post("/embed", json=bad)).json(), "Error", described)
    validate((await rest.get("/models")).json(), "Models", described)


async def test_the_docs_page_shows_the_document(rest: httpx.AsyncClient) -> None:
    answer = await rest.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "/openapi.json" in answer.text


async def test_the_example_of_the_document_is_a_request(rest: httpx.AsyncClient) -> None:
    described = await schema(rest)
    example = described["components"]["schemas"]["EmbedRequest"]["example"]
    validate(example, "EmbedRequest", described)
    answer = await rest.post("/embed", json=example)
    assert answer.json()["error"]["field"] == "features.product"  # well formed, of another model
