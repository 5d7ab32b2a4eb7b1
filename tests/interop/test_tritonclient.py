"""Tests of NVIDIA's tritonclient: results equal /embed's bit for bit.

REST and gRPC; sync, async and streaming; in binary, in JSON and by shared memory.
"""

import os
from typing import Any

import httpx
import numpy as np
import pytest
from interop.drivers import run_python_client
from interop.lookups import (
    DIMS,
    INVALID,
    INVALID_FIELD,
    MODEL,
    SHARED_MEMORY,
    Lookup,
    assert_outputs,
    large_response,
    lookups,
)
from interop.tools import ANSWER_S_MAX
from running_servers import Running

from embedserve_proto import open_inference_pb2 as pb

CLIENT_KINDS = (
    "http",
    "http, JSON",
    "http, concurrent",
    "http, aio",
    "grpc",
    "grpc, aio",
    "grpc, stream",
)
LOOKUPS = lookups(12)
OUTPUTS: tuple[list[str], ...] = ([], ["movie"], ["pooled"], ["movie", "user"])
UNSUPPORTED_FIELDS = {
    "ModelStatistics": {"batch_stats", "memory_usage", "response_stats"},
    "InferStatistics": {"cache_hit", "cache_miss"},
}
"""Fields of Triton's messages that ours lack."""
PARTIAL_MESSAGES = {f"inference.{name}" for name in ("ModelConfig", "ModelInput", "ModelOutput")}
"""Messages with only a few of Triton's fields."""


@pytest.fixture(scope="module")
def received(server: Running) -> dict[str, Any]:
    """Runs tritonclient once, and returns all that it received."""
    requested = [as_json(one, at) for at, one in enumerate(LOOKUPS)]
    parameters = {
        "http": server.http.removeprefix("http://"),
        "grpc": server.grpc,
        "model": MODEL,
        "requests": [*requested, as_json(large_response(), len(LOOKUPS))],
        "wrong": [requested[0], as_json(INVALID, 1), requested[1]],
        "placed": [as_json(one, at) for at, one in lookups_with_outputs()],
        "key": f"{SHARED_MEMORY}{os.getpid()}",
    }
    return run_python_client("tritonclient", parameters)


def as_json(one: Lookup, at: int) -> dict[str, Any]:
    return {"bags": one.bags, "outputs": OUTPUTS[at % len(OUTPUTS)], "id": f"request {at}"}


def lookups_with_outputs() -> list[tuple[int, Lookup]]:
    """Returns the lookups that name their outputs, with their positions.

    In the last one `pooled` has 5.8 MB.
    """
    named = [(at, one) for at, one in enumerate(LOOKUPS) if OUTPUTS[at % len(OUTPUTS)]]
    return [*named, (OUTPUTS.index(["pooled"]), large_response())]


def expected_of(one: Lookup, outputs: list[str]) -> dict[str, np.ndarray]:
    by_name = one.by_feature | {"pooled": one.values}
    return {name: by_name[name] for name in outputs or one.by_feature}


def check(response: Any, one: Lookup, at: int) -> None:
    assert (response["model"], response["version"], response["id"]) == (MODEL, "1", f"request {at}")
    assert_outputs(response["outputs"], expected_of(one, OUTPUTS[at % len(OUTPUTS)]))


@pytest.mark.parametrize("client_kind", CLIENT_KINDS)
def test_every_client_kind_gets_the_result_of_embed(
    received: dict[str, Any], client_kind: str
) -> None:
    responses = received["answers"][client_kind]
    requested = [*LOOKUPS, large_response()]
    assert len(responses) == len(requested)
    for at, (response, one) in enumerate(zip(responses, requested, strict=True)):
        check(response, one, at)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_shared_memory_results_equal_embed(received: dict[str, Any], protocol: str) -> None:
    shared = received["shared"][protocol]
    assert len(shared["answers"]) == len(lookups_with_outputs()) == 10
    for response, (at, one) in zip(shared["answers"], lookups_with_outputs(), strict=True):
        check(response, one, at)
    regions = shared["regions"]
    of_each = regions if protocol == "http" else [*regions["regions"].values()]
    assert {(one["name"], int(one["byte_size"])) for one in of_each} == {
        ("ids", 8 << 20),
        ("vectors", 8 << 20),
    }
    assert all(one["key"].startswith(SHARED_MEMORY) for one in of_each)
    assert "is registered already" in shared["again"]
    assert shared["left"] == ([] if protocol == "http" else {})


def test_embed_returns_the_expected_values(server: Running) -> None:
    response = httpx.post(
        f"{server.http}/embed", content=LOOKUPS[0].json_body, timeout=ANSWER_S_MAX
    )
    assert np.array_equal(np.array(response.json()["values"], np.float32), LOOKUPS[0].values)


def test_invalid_request_of_a_stream_is_answered_in_order(received: dict[str, Any]) -> None:
    first, wrong, last = received["streamed"]
    check(first, LOOKUPS[0], 0)
    check(last, LOOKUPS[1], 1)
    assert INVALID_FIELD in wrong


def test_client_reads_health_metadata_configuration_statistics_and_index(
    received: dict[str, Any],
) -> None:
    described = received["described"]
    assert described["ready"] == [True] * 4
    assert described["model_ready"] == [True, True, False, False] * 2
    rest, rpc = described["server"]
    assert (rest["name"], rest) == ("embedserve", rpc)
    rest, rpc = described["model"]
    assert {"name": "movie", "datatype": "FP32", "shape": [-1, DIMS["movie"]]} in rest["outputs"]
    names = [one["name"] for one in rest["inputs"]]
    assert names == ["user.ids", "user.lengths", "movie.ids", "movie.lengths"]
    assert [one["name"] for one in rpc["inputs"]] == names
    rest, rpc = (received["model_stats"][0] for received in described["statistics"])
    examples = sum(len(one.values) for one in [*LOOKUPS, large_response()])
    assert rest["inference_count"] >= len(CLIENT_KINDS) * examples
    assert int(rpc["inference_count"]) == rest["inference_count"]
    assert rest["inference_stats"]["success"]["count"] >= len(CLIENT_KINDS) * (len(LOOKUPS) + 1)
    rest, rpc = described["configuration"]
    assert (rest["name"], rest["max_batch_size"]) == (MODEL, 0)
    assert [one["name"] for one in rest["input"]] == names
    assert [one["name"] for one in rpc["input"]] == names
    assert {one["data_type"] for one in rpc["output"]} == {"TYPE_FP32"}
    rest, rpc = described["index"]
    assert rest == [{"name": MODEL, "version": "1", "state": "READY", "reason": ""}]
    assert rpc == {"models": [{"name": MODEL, "version": "1", "state": "READY"}]}


def test_client_reads_error_statuses_and_messages(received: dict[str, Any]) -> None:
    wrong_output, wrong_version, *over_grpc = received["errors"]
    assert "outputs[0] is 'nothing'" in wrong_output[0]
    assert wrong_output[1] == "400"
    assert "version is 2" in wrong_version[0]
    assert wrong_version[1] == "404"
    assert [status for _, status in over_grpc] == [
        "StatusCode.INVALID_ARGUMENT",
        "StatusCode.NOT_FOUND",
    ]
    assert [message for message, _ in over_grpc] == [wrong_output[0], wrong_version[0]]


def test_field_numbers_and_types_equal_those_of_triton(received: dict[str, Any]) -> None:
    theirs = received["field_numbers"]
    ours: dict[str, Any] = {}

    def add(message: Any) -> None:
        ours[message.full_name] = {one.name: [one.number, one.type] for one in message.fields}
        for nested in message.nested_types:
            add(nested)

    for message in pb.DESCRIPTOR.message_types_by_name.values():
        add(message)
    for name, numbers in ours.items():
        left_out = UNSUPPORTED_FIELDS.get(name.removeprefix("inference."), set())
        if name in PARTIAL_MESSAGES:
            left_out = theirs[name].keys() - numbers.keys()
        assert numbers == {f: n for f, n in theirs[name].items() if f not in left_out}, name
