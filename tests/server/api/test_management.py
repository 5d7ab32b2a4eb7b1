"""Tests of the management routes: health, models, metrics, OpenAPI pages, and the common format of
errors."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi.openapi.utils import get_openapi
from server.fake_admin import FakeAdmin
from server.fake_deltas import shared_state
from server.fake_engine import FakeEngine
from server.fake_models import info_of, model_info, ruled_info, unpooled_info
from server.fake_parts import FakeParts
from server.live import JSON, live_server, make_pipeline
from server.openapi import validate

from embedserve.api import openapi
from embedserve.api.management import management_app
from embedserve.batching.batcher import Batcher
from embedserve.config import Limits
from embedserve.deltas.status import DeltaStatus
from embedserve.errors import DRAINING
from embedserve.model_info import PendingVersion
from embedserve.pipeline import RequestPipeline
from embedserve.pipeline.telemetry import RequestTelemetry
from embedserve.shared_memory.region_registry import RegionRegistry
from embedserve_store.format.delta_manifest import LinePosition
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.plan import Plan, Shard, TablePlan

OPERATIONS = """
    embed embed_model info labels_of live metrics model models plan ready slow
    v2_configuration_of_model v2_configuration_of_version v2_index v2_infer
    v2_infer_version v2_live v2_model v2_model_ready v2_model_version v2_model_version_ready
    v2_ready v2_server v2_statistics_of_all v2_statistics_of_model v2_statistics_of_version
"""


async def schema(rest: httpx.AsyncClient) -> dict[str, Any]:
    described: dict[str, Any] = (await rest.get("/openapi.json")).json()
    return described


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


async def test_plan_lists_the_shards_of_each_rank(executor: ThreadPoolExecutor) -> None:
    user, movie = [TableSpec(name, 7, 12, (name,), "sum", "int8") for name in ("user", "movie")]
    tables = {
        "user": TablePlan("column_wise", (Shard(1, 0, 7, 0, 4), Shard(0, 0, 7, 4, 8))),
        "movie": TablePlan("data_parallel", (Shard(0, 0, 7, 0, 12), Shard(1, 0, 7, 0, 12))),
    }
    info = replace(info_of("films", [user, movie], {}), plan=Plan(2, tables, {}))
    app = management_app(make_pipeline(FakeEngine(info), executor=executor))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        payload = (await client.get("http://test/models/films/plan")).json()
        model = (await client.get("http://test/models/films")).json()
        validate(payload, "Plan", (await client.get("http://test/openapi.json")).json())
        assert (await client.get("http://test/models/shoes/plan")).status_code == 404
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


async def test_pending_version_is_shown(rest: httpx.AsyncClient, pipeline: RequestPipeline) -> None:
    assert "next" not in (await rest.get("/models/shop")).json()
    pending = PendingVersion(
        8, "failed", "its goldens are answered otherwise", "2026-11-22T18:00:00Z"
    )
    pipeline.models.pending_versions["shop"] = pending
    listed = (await rest.get("/models")).json()
    assert listed["models"][0]["version"] == 7
    assert listed["models"][0]["next"] == asdict(pending)
    validate(listed, "Models", await schema(rest))


async def test_tables_are_described_with_their_id_rules(executor: ThreadPoolExecutor) -> None:
    engines = FakeEngine(ruled_info()), FakeEngine(unpooled_info())
    app = management_app(make_pipeline(*engines, executor=executor))
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
async def test_errors_have_the_format_of_the_embed_routes(
    rest: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    response = await rest.request(method, path)
    assert (response.status_code, response.headers["content-type"]) == (status, JSON)
    assert response.json()["error"]["code"] == code
    assert response.headers.get("allow") == ("GET, HEAD" if status == 405 else None)
    validate(response.json(), "Error", await schema(rest))


async def test_every_openapi_reference_has_a_schema(
    rest: httpx.AsyncClient,
) -> None:
    response = await rest.get("/openapi.json")
    described = response.json()
    assert described["openapi"].startswith("3.1")
    named = set(re.findall(r'"#/components/schemas/(\w+)"', response.text))
    assert {"EmbedRequest", "EmbedResponse", "Error"} <= named
    assert named <= described["components"]["schemas"].keys()
    for one in described["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(one)
    for path in ("/embed", "/models/{model}/embed"):
        assert described["paths"][path].keys() == {"post"}
    named_in_path = [
        p["name"] for p in described["paths"]["/models/{model}/embed"]["post"]["parameters"]
    ]
    assert named_in_path == ["model", "X-Timeout-Ms", "X-Routing-Key"]


async def test_requests_and_responses_match_the_openapi_document(
    rest: httpx.AsyncClient,
) -> None:
    described = await schema(rest)
    for request in (
        {"features": {"user": [[1, 2], []]}},
        {"features": {"user": [1]}, "weights": {"user": [0.5]}},
    ):
        validate(request, "EmbedRequest", described)
        response = await rest.post("/embed", json=request)
        assert response.status_code == 200
        validate(response.json(), "EmbedResponse", described)
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


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
async def test_openapi_pages_load_nothing_from_other_hosts(
    rest: httpx.AsyncClient, path: str
) -> None:
    response = await rest.get(path)
    assert response.headers["content-type"].startswith("text/html")
    linked = re.findall(r"[\"'](\S*/(?:openapi\.json|static-[^\"']*))[\"']", response.text)
    assert "./openapi.json" in linked
    assert [one for one in linked if not one.startswith("./")] == []
    rules = response.headers["content-security-policy"].split("; ")
    assert {"default-src 'self'", "img-src 'self' data:"} <= set(rules)
    assert "http" not in " ".join(rules)
    assert "content-security-policy" not in (await rest.get("/models")).headers


async def test_openapi_paths_are_below_the_prefix_of_a_proxy(rest: httpx.AsyncClient) -> None:
    """Covers "Try it out" on /docs, and clients that resolve the server against the document."""
    (server,) = (await schema(rest))["servers"]
    assert httpx.URL("http://proxy/prefix/openapi.json").join(server["url"]).path == "/prefix/"


async def test_operation_ids_are_unique_and_stable(rest: httpx.AsyncClient) -> None:
    """Covers generated clients, which name their functions after the operations."""
    described = await schema(rest)
    operations = [one for path in described["paths"].values() for one in path.values()]
    assert sorted(one["operationId"] for one in operations) == sorted(OPERATIONS.split())
    for operation in operations:
        assert "default" in operation["responses"]


async def test_the_first_request_describes_the_routes_off_the_event_loop(
    rest: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that lookups do not wait for it, and that concurrent requests share it."""
    threads = []

    def recorded(**options: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return get_openapi(**options)

    monkeypatch.setattr(openapi, "get_openapi", recorded)
    first, second = await asyncio.gather(schema(rest), schema(rest))
    assert first == second == await schema(rest)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_operation_summaries_differ_from_function_names(
    executor: ThreadPoolExecutor,
) -> None:
    """Guards against FastAPI's default, which derives "Models" from models() and describes no
    operation."""
    shared = RegionRegistry("/", Limits())
    pipeline = make_pipeline(FakeEngine(), executor=executor, shared_memory=shared)
    paths = management_app(pipeline, FakeAdmin()).openapi()["paths"]
    assert {
        "/admin/load",
        "/admin/deltas/hold",
        "/v2/systemsharedmemory/status",
        "/embed",
        "/v2",
    } <= set(paths)
    for path, operations in paths.items():
        for operation in operations.values():
            name = operation["operationId"].removeprefix("v2_").replace("_", " ")
            words = operation["summary"].split()
            assert operation["summary"].lower() != name, path
            assert len(words) > 1, path
            assert words[1] == "Prometheus" or words[1].islower(), path


async def test_openapi_describes_the_operations_of_administrators(
    executor: ThreadPoolExecutor,
) -> None:
    app = management_app(make_pipeline(FakeEngine(), executor=executor), FakeAdmin())
    described = app.openapi()
    operations = {path: one for path, one in described["paths"].items() if "/admin/" in path}
    assert len(operations) == 5
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        for path, one in operations.items():
            assert list(one["post"]["requestBody"]["content"]) == [JSON], path
        assert (await client.post("/admin/reload", json={})).status_code == 202
    errors = {path: sorted(one["post"]["responses"])[1:-1] for path, one in operations.items()}
    assert errors == {
        "/admin/load": ["400", "409", "415"],  # an unknown model, too, is a conflict
        "/admin/unload": ["400", "409", "415"],
        "/admin/reload": ["415"],
        "/admin/deltas/hold": ["400", "404", "415"],
        "/admin/deltas/go-on": ["400", "404", "415"],
    }


async def test_openapi_parameters_are_path_and_header_parameters_only(
    rest: httpx.AsyncClient,
) -> None:
    for path, operations in (await schema(rest))["paths"].items():
        for operation in operations.values():
            parameters = operation.get("parameters", ())
            in_path = [one["name"] for one in parameters if one["in"] == "path"]
            assert in_path == re.findall(r"{(\w+)}", path)
            assert {one["in"] for one in parameters} <= {"path", "header"}


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


async def test_optional_fields_are_not_required_in_the_schema(rest: httpx.AsyncClient) -> None:
    schemas = (await schema(rest))["components"]["schemas"]
    assert schemas["IdRule"]["required"] == ["rule"]
    assert "next" not in schemas["Model"]["required"]
    # openapi-typescript treats a field with a default as always present.
    assert [name for name, one in schemas.items() if '"default"' in json.dumps(one)] == []
    assert schemas["EmbedRequest"]["required"] == ["features"]


@pytest.mark.parametrize(
    ("path", "status"), [("/health/ready", "503"), ("/models/{model}", "404"), ("/embed", "429")]
)
async def test_openapi_describes_errors_and_retry_after_headers(
    rest: httpx.AsyncClient, path: str, status: str
) -> None:
    (operation,) = (await schema(rest))["paths"][path].values()
    error = operation["responses"][status]
    reference = error["content"]["application/json"]["schema"]["$ref"]
    assert reference == "#/components/schemas/Error"
    assert ("Retry-After" in error.get("headers", {})) == (status in ("429", "503"))


@pytest.mark.parametrize("path", ["/embed", "/models/{model}/embed"])
async def test_openapi_examples_are_valid_requests(rest: httpx.AsyncClient, path: str) -> None:
    described = await schema(rest)
    operation = described["paths"][path]["post"]
    examples = operation["requestBody"]["content"]["application/json"]["examples"]
    assert list(examples) == ["shop"]
    validate(examples["shop"]["value"], "EmbedRequest", described)
    url = path.format(model=operation["parameters"][0].get("example"))
    response = await rest.post(url, json=examples["shop"]["value"])
    assert response.status_code == 200


async def test_open_inference_examples_are_valid_requests(
    rest: httpx.AsyncClient,
) -> None:
    described = await schema(rest)
    for path in ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"):
        operation = described["paths"][path]["post"]
        named = {p["name"]: p["example"] for p in operation["parameters"] if p["in"] == "path"}
        (example,) = operation["requestBody"]["content"]["application/json"]["examples"].values()
        validate(example["value"], "InferRequest", described)
        response = await rest.post(path.format(**named), json=example["value"])
        assert response.status_code == 200, response.text
        validate(response.json(), "InferResponse", described)


async def test_openapi_examples_follow_the_served_version(executor: ThreadPoolExecutor) -> None:
    """Checks that examples are not those of a former version. A model without goldens has none."""
    engine = FakeEngine()
    pipeline = make_pipeline(engine, FakeEngine(unpooled_info()), executor=executor)
    app = management_app(pipeline)

    def examples() -> dict[str, Any]:
        operation = app.openapi()["paths"]["/models/{model}/embed"]["post"]
        found: dict[str, Any] = operation["requestBody"]["content"]["application/json"]["examples"]
        return {name: one["value"]["features"] for name, one in found.items()}

    before = examples()
    assert list(before) == ["shop"]
    after = FakeEngine(replace(engine.model, example={"user": [[3]]}))
    metrics = pipeline.metrics.models["shop"]
    pipeline.models.activate("shop", Batcher(after, after.model, Limits(), metrics, executor))
    assert examples() == {"shop": {"user": [[3]]}}


async def test_slow_route_lists_the_slowest_requests(
    rest: httpx.AsyncClient, pipeline: RequestPipeline
) -> None:
    assert (await rest.get("/slow")).json() == {"seconds": 600, "requests": []}
    pipeline.telemetry = RequestTelemetry(slow_ms=1e-6)
    ids = {"X-Request-Id": "a7"}
    body = {"features": {"user": [[1, 2], [3]]}}
    assert (await rest.post("/embed", json=body, headers=ids)).status_code == 200
    payload = (await rest.get("/slow")).json()
    validate(payload, "Slow", await schema(rest))
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


async def test_deltas_of_a_followed_model_are_described() -> None:
    status = DeltaStatus(LinePosition(3, 4, "0" * 64))
    status.stall("delta 5 is damaged")
    engine = FakeEngine(replace(model_info(), deltas=shared_state(status)))
    with ThreadPoolExecutor(1) as executor:
        pipeline = make_pipeline(engine, executor=executor)
        transport = httpx.ASGITransport(management_app(pipeline))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as rest:
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


async def test_parts_of_a_router_model_are_described(rest: httpx.AsyncClient) -> None:
    plain = (await rest.get("/models/shop")).json()
    assert not plain.keys() & {"shards", "local_tables"}
    parts = FakeParts(joined={("shop", 7): [2, 0]})
    engine = FakeEngine(replace(model_info(), shards=parts, local_tables=("user",)))
    with ThreadPoolExecutor(1) as executor:
        pipeline = make_pipeline(engine, executor=executor)
        transport = httpx.ASGITransport(management_app(pipeline))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as router:
            payload = (await router.get("/models/shop")).json()
    assert payload["local_tables"] == ["user"]
    assert payload["shards"] == [
        {"part": 0, "replicas": 2, "why": ""},
        {"part": 1, "replicas": 0, "why": "part 1 is lost"},
    ]
