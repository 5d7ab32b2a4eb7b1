"""Tests of NVIDIA's tritonclient: results equal /embed's bit for bit.

REST and gRPC; sync, async and streaming; in binary, in JSON and by shared memory.
"""

from __future__ import annotations

import os
from typing import Any

import httpx
import numpy as np
import pytest
from interop.drivers import told_by_python
from interop.lookups import (
    DIMS,
    MODEL,
    SHARED_MEMORY,
    WRONG,
    WRONG_FIELD,
    Lookup,
    assert_outputs,
    large_answer,
    lookups,
)
from interop.tools import ANSWER_S_MAX
from running_servers import Running

from embedserve_proto import open_inference_pb2 as pb

FORMS = (
    "http",
    "http, JSON",
    "http, at once",
    "http, aio",
    "grpc",
    "grpc, aio",
    "grpc, stream",
)
ASKED = lookups(12)
OUTPUTS: tuple[list[str], ...] = ([], ["movie"], ["pooled"], ["movie", "user"])
MORE_OF_THE_PROTOCOL = {
    "ModelStatistics": {"batch_stats", "memory_usage", "response_stats"},
    "InferStatistics": {"cache_hit", "cache_miss"},
}
"""Fields of Triton's messages that ours lack."""
IN_PART = {f"inference.{name}" for name in ("ModelConfig", "ModelInput", "ModelOutput")}
"""Messages with only a few of Triton's fields."""


@pytest.fixture(scope="module")
def told(server: Running) -> dict[str, Any]:
    """Runs tritonclient once, and returns all that it received."""
    asked = [as_asked(one, at) for at, one in enumerate(ASKED)]
    given = {
        "http": server.http.removeprefix("http://"),
        "grpc": server.grpc,
        "model": MODEL,
        "asked": [*asked, as_asked(large_answer(), len(ASKED))],
        "wrong": [asked[0], as_asked(WRONG, 1), asked[1]],
        "placed": [as_asked(one, at) for at, one in placed()],
        "key": f"{SHARED_MEMORY}{os.getpid()}",
    }
    return told_by_python("tritonclient", given)


def as_asked(one: Lookup, at: int) -> dict[str, Any]:
    return {"bags": one.bags, "outputs": OUTPUTS[at % len(OUTPUTS)], "id": f"request {at}"}


def placed() -> list[tuple[int, Lookup]]:
    """Returns the lookups that name their outputs, with their positions.

    In the last one `pooled` has 5.8 MB.
    """
    named = [(at, one) for at, one in enumerate(ASKED) if OUTPUTS[at % len(OUTPUTS)]]
    return [*named, (OUTPUTS.index(["pooled"]), large_answer())]


def expected_of(one: Lookup, outputs: list[str]) -> dict[str, np.ndarray]:
    by_name = one.by_feature | {"pooled": one.values}
    return {name: by_name[name] for name in outputs or one.by_feature}


def check(answer: Any, one: Lookup, at: int) -> None:
    assert (answer["model"], answer["version"], answer["id"]) == (MODEL, "1", f"request {at}")
    assert_outputs(answer["outputs"], expected_of(one, OUTPUTS[at % len(OUTPUTS)]))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_answered_as_embed_is(told: dict[str, Any], form: str) -> None:
    answers = told["answers"][form]
    asked = [*ASKED, large_answer()]
    assert len(answers) == len(asked)
    for at, (answer, one) in enumerate(zip(answers, asked, strict=True)):
        check(answer, one, at)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_shared_memory(told: dict[str, Any], protocol: str) -> None:
    shared = told["shared"][protocol]
    assert len(shared["answers"]) == len(placed()) == 10
    for answer, (at, one) in zip(shared["answers"], placed(), strict=True):
        check(answer, one, at)
    regions = shared["regions"]
    of_each = regions if protocol == "http" else [*regions["regions"].values()]
    assert {(one["name"], int(one["byte_size"])) for one in of_each} == {
        ("ids", 8 << 20),
        ("vectors", 8 << 20),
    }
    assert all(one["key"].startswith(SHARED_MEMORY) for one in of_each)
    assert "is registered already" in shared["again"]
    assert shared["left"] == ([] if protocol == "http" else {})


def test_embed_answers_the_same(server: Running) -> None:
    answer = httpx.post(f"{server.http}/embed", content=ASKED[0].json_body, timeout=ANSWER_S_MAX)
    assert np.array_equal(np.array(answer.json()["values"], np.float32), ASKED[0].values)


def test_a_wrong_request_of_a_stream_is_answered_in_its_place(told: dict[str, Any]) -> None:
    first, wrong, last = told["streamed"]
    check(first, ASKED[0], 0)
    check(last, ASKED[1], 1)
    assert WRONG_FIELD in wrong


def test_health_metadata_configuration_statistics_and_index(told: dict[str, Any]) -> None:
    described = told["described"]
    assert described["ready"] == [True] * 4
    assert described["model_ready"] == [True, True, False, False] * 2
    rest, rpc = described["server"]
    assert (rest["name"], rest) == ("embedserve", rpc)
    rest, rpc = described["model"]
    assert {"name": "movie", "datatype": "FP32", "shape": [-1, DIMS["movie"]]} in rest["outputs"]
    names = [one["name"] for one in rest["inputs"]]
    assert names == ["user.ids", "user.lengths", "movie.ids", "movie.lengths"]
    assert [one["name"] for one in rpc["inputs"]] == names
    rest, rpc = (told["model_stats"][0] for told in described["statistics"])
    examples = sum(len(one.values) for one in [*ASKED, large_answer()])
    assert rest["inference_count"] >= len(FORMS) * examples
    assert int(rpc["inference_count"]) == rest["inference_count"]
    assert rest["inference_stats"]["success"]["count"] >= len(FORMS) * (len(ASKED) + 1)
    rest, rpc = described["configuration"]
    assert (rest["name"], rest["max_batch_size"]) == (MODEL, 0)
    assert [one["name"] for one in rest["input"]] == names
    assert [one["name"] for one in rpc["input"]] == names
    assert {one["data_type"] for one in rpc["output"]} == {"TYPE_FP32"}
    rest, rpc = described["index"]
    assert rest == [{"name": MODEL, "version": "1", "state": "READY", "reason": ""}]
    assert rpc == {"models": [{"name": MODEL, "version": "1", "state": "READY"}]}


def test_errors_are_read_by_the_client(told: dict[str, Any]) -> None:
    wrong_output, wrong_version, *over_grpc = told["errors"]
    assert "outputs[0] is 'nothing'" in wrong_output[0]
    assert wrong_output[1] == "400"
    assert "version is 2" in wrong_version[0]
    assert wrong_version[1] == "404"
    assert [status for _, status in over_grpc] == [
        "StatusCode.INVALID_ARGUMENT",
        "StatusCode.NOT_FOUND",
    ]
    assert [message for message, _ in over_grpc] == [wrong_output[0], wrong_version[0]]


def test_field_numbers_and_types_are_those_of_tritons_messages(told: dict[str, Any]) -> None:
    theirs = told["field_numbers"]
    mine: dict[str, Any] = {}

    def add(message: Any) -> None:
        mine[message.full_name] = {one.name: [one.number, one.type] for one in message.fields}
        for nested in message.nested_types:
            add(nested)

    for message in pb.DESCRIPTOR.message_types_by_name.values():
        add(message)
    for name, numbers in mine.items():
        left_out = MORE_OF_THE_PROTOCOL.get(name.removeprefix("inference."), set())
        if name in IN_PART:
            left_out = theirs[name].keys() - numbers.keys()
        assert numbers == {f: n for f, n in theirs[name].items() if f not in left_out}, name
