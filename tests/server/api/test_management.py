"""Tests of the management routes: health, models, slow requests and the format of errors."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import httpx
import pytest
from server.api.clients import client_of
from server.fake_deltas import shared_state
from server.fake_engine import FakeEngine
from server.fake_models import info_of, model_info, ruled_info, unpooled_info
from server.fake_parts import FakeParts
from server.live import JSON, live_server, make_pipeline
from server.openapi import validate

from embedserve.api.management import management_app
from embedserve.deltas.status import DeltaStatus
from embedserve.errors import DRAINING
from embedserve.model_info import PendingVersion
from embedserve.pipeline import RequestPipeline
from embedserve.pipeline.telemetry import RequestTelemetry
from embedserve_store.format.delta_manifest import LinePosition
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.plan import Plan, Shard, TablePlan


async def test_live_and_ready_routes_report_the_state(
    rest: httpx.AsyncClient, pipeline: RequestPipeline
) -> None:
    assert (await rest.get("/health/live")).json() == {"status": "live"}
    assert (await rest.get("/health/ready")).json() == {"status": "ready"}
    pipeline.models.not_ready = DRAINING
    assert (await rest.get("/health/live")).status_code == 200
    response = await rest.get("/health/ready")
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    assert response.json()["error"]["code"] == "UNAVAILABLE"


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


async def test_plan_lists_the_shards_of_each_rank(
    executor: ThreadPoolExecutor, described: dict[str, Any]
) -> None:
    user, movie = [TableSpec(name, 7, 12, (name,), "sum", "int8") for name in ("user", "movie")]
    tables = {
        "user": TablePlan("column_wise", (Shard(1, 0, 7, 0, 4), Shard(0, 0, 7, 4, 8))),
        "movie": TablePlan("data_parallel", (Shard(0, 0, 7, 0, 12), Shard(1, 0, 7, 0, 12))),
    }
    info = replace(info_of("films", [user, movie], {}), plan=Plan(2, tables, {}))
    app = management_app(make_pipeline(FakeEngine(info), executor=executor))
    async with client_of(app) as client:
        payload = (await client.get("/models/films/plan")).json()
        model = (await client.get("/models/films")).json()
        validate(payload, "Plan", described)
        assert (await client.get("/models/shoes/plan")).status_code == 404
    by_columns, copied = payload["tables"]
    assert (payload["version"], payload["ranks"], by_columns["sharding"]) == (7, 2, "column_wise")
    first, second = by_columns["shards"]
    assert first == {
        **{"rank": 1, "row_offset": 0, "row_count": 7, "col_offset": 0, "col_count": 4},
        "bytes": 7 * (4 + 4),  # a scale and bias for each row
    }
    assert (second["rank"], second["col_offset"], second["bytes"]) == (0, 4, 7 * (4 + 8))
    assert [shard["rank"] for shard in copied["shards"]] == [0]  # lookups use rank 0's copy
    assert model["bytes_per_rank"] == [7 * 12 + 7 * 16, 7 * 8]


async def test_pending_version_is_shown(
    rest: httpx.AsyncClient, pipeline: RequestPipeline, described: dict[str, Any]
) -> None:
    assert "next" not in (await rest.get("/models/shop")).json()
    pending = PendingVersion(
        8, "failed", "its goldens are answered otherwise", "2026-11-22T18:00:00Z"
    )
    pipeline.models.pending_versions["shop"] = pending
    listed = (await rest.get("/models")).json()
    assert listed["models"][0]["version"] == 7
    assert listed["models"][0]["next"] == asdict(pending)
    validate(listed, "Models", described)
    for state, named in (("failed", "UNAVAILABLE"), ("loading", "LOADING")):
        pipeline.models.pending_versions["shop@canary"] = replace(pending, state=state)
        index = (await rest.post("/v2/repository/index")).json()
        reason = pending.reason
        assert {"name": "shop", "version": "8", "state": named, "reason": reason} in index
        ready = (await rest.post("/v2/repository/index", json={"ready": True})).json()
        assert [one["version"] for one in ready] == ["7"]


async def test_tables_are_described_with_their_id_rules(
    executor: ThreadPoolExecutor, described: dict[str, Any]
) -> None:
    engines = FakeEngine(ruled_info()), FakeEngine(unpooled_info())
    app = management_app(make_pipeline(*engines, executor=executor))
    async with client_of(app) as client:
        listed = (await client.get("/models")).json()
        validate(listed, "Models", described)
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
async def test_errors_have_the_format_of_the_embed_routes(
    rest: httpx.AsyncClient,
    described: dict[str, Any],
    method: str,
    path: str,
    status: int,
    code: str,
) -> None:
    response = await rest.request(method, path)
    assert (response.status_code, response.headers["content-type"]) == (status, JSON)
    assert response.json()["error"]["code"] == code
    assert response.headers.get("allow") == ("GET, HEAD" if status == 405 else None)
    validate(response.json(), "Error", described)


@pytest.mark.parametrize("ready", [0, "true", None])
async def test_repository_index_rejects_a_non_boolean_ready(
    rest: httpx.AsyncClient, ready: Any
) -> None:
    response = await rest.post("/v2/repository/index", json={"ready": ready})
    assert (response.status_code, response.json()["error"].split(":")[0]) == (400, "body.ready")


@pytest.mark.parametrize(
    "headers", [{}, {"Content-Type": "application/x-www-form-urlencoded"}], ids=["none", "form"]
)
async def test_repository_index_reads_json_of_any_content_type(
    rest: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    for ready in (b"true", b"1"):
        body = b'{"ready": %s}' % ready
        response = await rest.post("/v2/repository/index", content=body, headers=headers)
        assert response.status_code == (200 if ready == b"true" else 400)


async def test_slow_route_lists_the_slowest_requests(
    rest: httpx.AsyncClient, pipeline: RequestPipeline, described: dict[str, Any]
) -> None:
    assert (await rest.get("/slow")).json() == {"seconds": 600, "requests": []}
    pipeline.telemetry = RequestTelemetry(slow_ms=1e-6)
    ids = {"X-Request-Id": "a7"}
    body = {"features": {"user": [[1, 2], [3]]}}
    assert (await rest.post("/embed", json=body, headers=ids)).status_code == 200
    payload = (await rest.get("/slow")).json()
    validate(payload, "Slow", described)
    (one,) = payload["requests"]
    assert (one["request_id"], one["model"], one["outcome"]) == ("a7", "shop", "OK")
    assert (one["version"], one["examples"], one["ids"]) == (7, 2, 3)
    assert one["total_ms"] >= one["lookup_ms"] > 0


async def test_links_of_the_root_page_work(engine: FakeEngine) -> None:
    async with live_server(engine) as live:
        page = await live.http.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        links = re.findall('href="([^"]*)"', page.text)
        # Relative, for proxies with a prefix.
        assert links == ["./console", "./docs", "./models", "./metrics", "./health/ready"]
        for link in links:
            assert (await live.http.get(link)).status_code == 200


async def test_deltas_of_a_followed_model_are_described(executor: ThreadPoolExecutor) -> None:
    status = DeltaStatus(LinePosition(3, 4, "0" * 64))
    status.stall("delta 5 is damaged")
    engine = FakeEngine(replace(model_info(), deltas=shared_state(status)))
    async with client_of(management_app(make_pipeline(engine, executor=executor))) as rest:
        payload = (await rest.get("/models/shop")).json()["deltas"]
    assert payload.pop("lag_s") >= 0
    assert payload == {
        "line": 3,
        "seq": 4,
        "wanted_seq": 4,
        "state": "stalled",
        "reason": "delta 5 is damaged",
        "rows_changed": 0,
        "ids_changed": 0,
        "memory_bytes": 0,
        "undo_from": 4,
    }


async def test_parts_of_a_router_model_are_described(
    rest: httpx.AsyncClient, executor: ThreadPoolExecutor
) -> None:
    plain = (await rest.get("/models/shop")).json()
    assert not plain.keys() & {"shards", "local_tables"}
    parts = FakeParts(joined={("shop", 7): [2, 0]})
    engine = FakeEngine(replace(model_info(), shards=parts, local_tables=("user",)))
    async with client_of(management_app(make_pipeline(engine, executor=executor))) as router:
        payload = (await router.get("/models/shop")).json()
    assert payload["local_tables"] == ["user"]
    assert payload["shards"] == [
        {"part": 0, "replicas": 2, "why": ""},
        {"part": 1, "replicas": 0, "why": "part 1 is lost"},
    ]
