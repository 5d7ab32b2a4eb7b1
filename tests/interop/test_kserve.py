"""Tests of KServe's InferenceRESTClient and InferenceGRPCClient: results equal /embed's.

They are equal bit for bit. Installing the clients takes a minute and 320 MB.
"""

from typing import Any

import pytest
from interop.drivers import run_python_client
from interop.lookups import (
    DIMS,
    INVALID,
    INVALID_FIELD,
    MODEL,
    Lookup,
    assert_outputs,
    large_response,
    lookups,
)
from running_servers import Running

pytestmark = pytest.mark.soak


def all_lookups() -> list[Lookup]:
    return [*lookups(6), large_response()]


@pytest.fixture(scope="module")
def received(server: Running) -> dict[str, Any]:
    """Runs KServe's clients once, and returns all that they received."""
    parameters = {
        "http": server.http,
        "grpc": server.grpc,
        "model": MODEL,
        "requests": [as_json(one, at) for at, one in enumerate(all_lookups())],
        "wrong": as_json(INVALID, 0),
    }
    return run_python_client("kserve", parameters)


def as_json(one: Lookup, at: int) -> dict[str, Any]:
    return {"bags": one.bags, "id": f"request {at}"}


@pytest.mark.parametrize("kind", ["REST, JSON", "REST, binary", "gRPC, typed", "gRPC, raw"])
def test_every_request_format_gets_the_result_of_embed(received: dict[str, Any], kind: str) -> None:
    responses = received[kind.partition(",")[0]]["answers"][kind]
    for at, (response, one) in enumerate(zip(responses, all_lookups(), strict=True)):
        version = "1" if kind.startswith("gRPC") else None  # KServe's REST client drops it
        assert (response["model"], response["version"]) == (MODEL, version)
        assert response["id"] == f"request {at}"
        assert list(response["outputs"]) == list(DIMS)
        assert_outputs(response["outputs"], one.by_feature)


@pytest.mark.parametrize("protocol", ["REST", "gRPC"])
def test_client_reads_readiness_and_errors(received: dict[str, Any], protocol: str) -> None:
    assert received[protocol]["ready"] == [True, True, True, False]
    assert INVALID_FIELD in received[protocol]["error"]
