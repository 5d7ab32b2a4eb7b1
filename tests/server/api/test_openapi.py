"""Tests of the OpenAPI document and its pages."""

import asyncio
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi.openapi.utils import get_openapi
from server.api.clients import client_of
from server.fake_admin import FakeAdmin
from server.fake_engine import FakeEngine
from server.fake_models import unpooled_info
from server.live import JSON, make_pipeline
from server.openapi import validate

from embedserve.api import openapi
from embedserve.api.management import management_app
from embedserve.batching.batcher import Batcher
from embedserve.config import Limits
from embedserve.shared_memory.region_registry import RegionRegistry

OPERATIONS = """
    embed embed_model info labels_of live metrics model models plan ready slow
    v2_configuration_of_model v2_configuration_of_version v2_index v2_infer
    v2_infer_version v2_live v2_model v2_model_ready v2_model_version v2_model_version_ready
    v2_ready v2_server v2_statistics_of_all v2_statistics_of_model v2_statistics_of_version
"""


async def test_every_openapi_reference_has_a_schema(
    rest: httpx.AsyncClient, described: dict[str, Any]
) -> None:
    response = await rest.get("/openapi.json")
    assert response.json() == described
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
    rest: httpx.AsyncClient, described: dict[str, Any]
) -> None:
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


def test_openapi_paths_are_below_the_prefix_of_a_proxy(described: dict[str, Any]) -> None:
    """Covers "Try it out" on /docs, and clients that resolve the server against the document."""
    (server,) = described["servers"]
    assert httpx.URL("http://proxy/prefix/openapi.json").join(server["url"]).path == "/prefix/"


def test_operation_ids_are_unique_and_stable(described: dict[str, Any]) -> None:
    """Covers generated clients, which name their functions after the operations."""
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
    first, second = await asyncio.gather(*(rest.get("/openapi.json") for _ in range(2)))
    assert first.text == second.text == (await rest.get("/openapi.json")).text
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
    async with client_of(app) as client:
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


def test_openapi_parameters_are_path_and_header_parameters_only(described: dict[str, Any]) -> None:
    for path, operations in described["paths"].items():
        for operation in operations.values():
            parameters = operation.get("parameters", ())
            in_path = [one["name"] for one in parameters if one["in"] == "path"]
            assert in_path == re.findall(r"{(\w+)}", path)
            assert {one["in"] for one in parameters} <= {"path", "header"}


def test_optional_fields_are_not_required_in_the_schema(described: dict[str, Any]) -> None:
    schemas = described["components"]["schemas"]
    assert schemas["IdRule"]["required"] == ["rule"]
    assert "next" not in schemas["Model"]["required"]
    # openapi-typescript treats a field with a default as always present.
    assert [name for name, one in schemas.items() if '"default"' in json.dumps(one)] == []
    assert schemas["EmbedRequest"]["required"] == ["features"]


@pytest.mark.parametrize(
    ("path", "status"), [("/health/ready", "503"), ("/models/{model}", "404"), ("/embed", "429")]
)
def test_openapi_describes_errors_and_retry_after_headers(
    described: dict[str, Any], path: str, status: str
) -> None:
    (operation,) = described["paths"][path].values()
    error = operation["responses"][status]
    reference = error["content"]["application/json"]["schema"]["$ref"]
    assert reference == "#/components/schemas/Error"
    assert ("Retry-After" in error.get("headers", {})) == (status in ("429", "503"))


@pytest.mark.parametrize("path", ["/embed", "/models/{model}/embed"])
async def test_openapi_examples_are_valid_requests(
    rest: httpx.AsyncClient, described: dict[str, Any], path: str
) -> None:
    operation = described["paths"][path]["post"]
    examples = operation["requestBody"]["content"]["application/json"]["examples"]
    assert list(examples) == ["shop"]
    validate(examples["shop"]["value"], "EmbedRequest", described)
    url = path.format(model=operation["parameters"][0].get("example"))
    response = await rest.post(url, json=examples["shop"]["value"])
    assert response.status_code == 200


async def test_open_inference_examples_are_valid_requests(
    rest: httpx.AsyncClient, described: dict[str, Any]
) -> None:
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
