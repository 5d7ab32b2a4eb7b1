"""Tests of the calls of a lookup with shared memory, given the response to each call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from client.placed_protocols import PREFIX, PROTOCOLS, Calls, Grpc, Rest, path, protocol_of
from google.protobuf.json_format import ParseDict

from embedserve_client import (
    DeadlineExceeded,
    EmbedResult,
    EmbedServeClientError,
    InvalidRequest,
    Overloaded,
    ServerError,
    Unavailable,
)
from embedserve_client.core.result import Layout
from embedserve_client.core.retry_loop import Steps
from embedserve_client.grpc.requests import GrpcRequests
from embedserve_client.rest.requests import RestRequests
from embedserve_proto import open_inference_pb2 as pb

WIDTH = 128
EXAMPLES = 1024
USERS = np.arange(EXAMPLES)
LAYOUT = Layout(("user",), (WIDTH,))


@pytest.fixture
def calls(protocol: Any) -> Iterator[Calls]:
    calls = protocol.made()
    yield calls
    calls.close()
    assert files() == []


def files() -> list[Path]:
    return list(Path("/dev/shm").glob(f"{PREFIX[1:]}*"))


def lookup(calls: Calls, **options: Any) -> Steps[EmbedResult]:
    given: dict[str, Any] = {"model": None, "timeout_s": None, "output_dtype": "float32"}
    given |= {
        "features": {"user": USERS},
        "weights": None,
        "output_keys": (),
        "routing_key": None,
        "min_seq": None,
    }
    question = calls.embed(**given | options)
    return question.steps(question.timeout_s)


def embedded(version: int = 1, layout: Layout = LAYOUT, examples: int = EXAMPLES) -> EmbedResult:
    """Returns the result of a call to /embed."""
    return EmbedResult(np.zeros((examples, layout.width), np.float32), layout, "shop", version)


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> Any:
    return PROTOCOLS[request.param]


def inferred(call: Any, version: int = 1, width: int = WIDTH, **parameters: int) -> Any:
    """Returns the response to an inference; the server has written only the first number of the
    output."""
    protocol = protocol_of(call)
    (output,) = protocol.asked(call)["outputs"]
    place = output["parameters"]
    file = Path("/dev/shm") / place["shared_memory_region"]
    with file.open("r+b") as opened:
        opened.seek(place["shared_memory_offset"])
        opened.write(np.float32(version).tobytes())
    shape = [EXAMPLES, width]
    placed = {"shared_memory_region": place["shared_memory_region"]}
    answered = {"name": "pooled", "datatype": "FP32", "shape": shape, "parameters": placed}
    answer = {"model_name": "shop", "model_version": str(version), "outputs": [answered]}
    return protocol.answered(call, answer | {"parameters": parameters})


def ended(steps: Steps[EmbedResult], answer: Any) -> EmbedResult:
    try:
        call = steps.send(answer)
    except StopIteration as end:
        result: EmbedResult = end.value
        return result
    raise AssertionError(f"{path(call)} is asked for, too")


def learn(calls: Calls, **options: Any) -> None:
    """Runs the first lookup, which registers a region and gets its vectors over /embed."""
    steps = lookup(calls, **options)
    assert path(next(steps)) == "register"
    assert path(steps.send(None)) == "/embed"
    ended(steps, embedded())


def test_the_first_registers_a_region_and_the_next_uses_it(calls: Calls, protocol: Any) -> None:
    learn(calls)
    steps = lookup(calls, routing_key="7")

    call = next(steps)
    result = ended(steps, inferred(call))

    assert (path(call), protocol.routed(call)) == ("/v2/models/shop/infer", "7")
    assert (result.model, result.version, result.values.shape) == ("shop", 1, (EXAMPLES, WIDTH))
    assert result.values[0, 0] == 1
    assert result.values.base is not None
    assert len(files()) == 1


def test_the_seq_is_a_parameter(calls: Calls) -> None:
    learn(calls)
    for seq in (0, 1234):
        steps = lookup(calls)
        assert ended(steps, inferred(next(steps), seq=seq)).seq == seq
    steps = lookup(calls)
    assert ended(steps, inferred(next(steps))).seq is None


def test_counts_of_ids_are_parameters(calls: Calls) -> None:
    learn(calls)
    counts = {"missing_ids.user": 3, "unknown_ids.movie": 4}
    for name, of_name in (("missing_ids", {"user": 3}), ("unknown_ids", {"movie": 4})):
        for parameters, expected in ((counts, of_name), ({}, {})):
            steps = lookup(calls)
            assert getattr(ended(steps, inferred(next(steps), **parameters)), name) == expected


def test_a_name_is_asked_for_as_it_was_given(calls: Calls) -> None:
    learn(calls, model="shop@stable")

    assert path(next(lookup(calls, model="shop@stable"))) == "/v2/models/shop@stable/infer"


def test_a_version_that_is_new_is_asked_for_once_without(calls: Calls) -> None:
    learn(calls)
    steps = lookup(calls)

    assert path(steps.send(inferred(next(steps), version=2))) == "/embed"
    ended(steps, embedded(version=2))

    for version in (1, 2):
        steps = lookup(calls)
        assert ended(steps, inferred(next(steps), version)).version == version


def test_vectors_of_another_width_are_not_taken(calls: Calls) -> None:
    learn(calls)
    steps = lookup(calls)

    assert path(steps.send(inferred(next(steps), width=WIDTH // 2))) == "/embed"


REFUSALS = [
    (400, "output 'pooled' has 9 bytes, and its shared_memory_byte_size is 8"),
    (404, "shared memory region 'x' is not registered"),
    (413, "inputs has 7 bytes in shared memory, the limit is 6"),
]


@pytest.mark.parametrize(("status", "said"), REFUSALS)
def test_what_is_refused_is_asked_for_without_and_its_region_dropped(
    calls: Calls, status: int, said: str
) -> None:
    learn(calls)
    steps = lookup(calls)
    error = error_of(next(steps), status, said)

    assert said in str(error)
    assert path(steps.throw(error)) == "/embed"
    assert files() == []
    ended(steps, embedded())

    # A server that forgot the region has been replaced: the client registers and calls /embed
    # again.
    steps = lookup(calls)
    assert path(next(steps)) == "register"
    assert path(steps.send(None)) == "/embed"
    ended(steps, embedded())
    assert path(next(lookup(calls))) == "/v2/models/shop/infer"


def error_of(call: Any, status: int, said: str, **headers: str) -> EmbedServeClientError:
    protocol = protocol_of(call)
    error: EmbedServeClientError = protocol.error(call, status, said, **headers)
    return error


@pytest.mark.parametrize(
    "error", [DeadlineExceeded("late"), Unavailable("gone"), KeyboardInterrupt()]
)
def test_a_region_is_not_used_again_where_the_server_may_yet_write_to_it(
    calls: Calls, error: BaseException
) -> None:
    learn(calls)
    steps = lookup(calls)
    next(steps)

    with pytest.raises(type(error)):
        steps.throw(error)
    assert files() == []


def test_of_an_overloaded_server_the_region_is_kept(calls: Calls) -> None:
    learn(calls)
    steps = lookup(calls)
    error = error_of(next(steps), 429, "the queue is full", **{"Retry-After": "3"})

    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 3.0
    with pytest.raises(Overloaded):
        steps.throw(error)
    assert path(next(lookup(calls))) == "/v2/models/shop/infer"


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (404, "no such route", "the server has no shared memory: it is started with --shared-mem"),
        (400, "key is '/x': it does not begin with '/y-'", "it does not begin with '/y-'"),
    ],
)
def test_a_server_that_has_none_or_another_is_told_at_once(
    calls: Calls, status: int, said: str, expected: str
) -> None:
    steps = lookup(calls)
    error = error_of(next(steps), status, said)

    with pytest.raises(InvalidRequest, match=f"shared_memory is '{PREFIX}': .*{expected}"):
        steps.throw(error)
    assert error.field == "shared_memory"
    assert files() == []


@pytest.mark.parametrize("status", [401, 403, 409, 413])
def test_where_a_region_is_refused_lookups_go_without(calls: Calls, status: int) -> None:
    for _ in range(2):
        steps = lookup(calls)
        error = error_of(next(steps), status, "256 regions of shared memory are registered")
        assert path(steps.throw(error)) == "/embed"
        ended(steps, embedded())
    assert files() == []


def test_a_server_that_is_not_there_is_told_as_without(calls: Calls) -> None:
    steps = lookup(calls)
    next(steps)

    with pytest.raises(Unavailable):
        steps.throw(Unavailable("refused"))
    assert files() == []


OVER_THE_CONNECTION: list[dict[str, Any]] = [
    {"features": {"user": USERS[:8]}},
    {"output_keys": ["user"]},
    {"features": {"user": np.array(["a"] * EXAMPLES)}},
]


@pytest.mark.parametrize("options", OVER_THE_CONNECTION)
def test_what_goes_over_the_connection(calls: Calls, options: dict[str, Any]) -> None:
    learn(calls)

    assert path(next(lookup(calls, **options))) == "/embed"


def test_of_a_model_that_is_not_pooled_each_key_is_asked_for(calls: Calls, protocol: Any) -> None:
    layout = Layout(("user@t_a", "tag", "user@t_b"), (WIDTH, WIDTH, WIDTH))
    lengths = np.array([[1] * EXAMPLES, [0] * EXAMPLES, [1] * EXAMPLES], np.int32)
    rows = np.zeros((2 * EXAMPLES, WIDTH), np.float32)
    steps = lookup(calls)
    next(steps)
    steps.send(None)
    ended(steps, EmbedResult(rows, layout, "sequence", 1, {}, lengths))

    users = USERS[:512]
    steps = lookup(calls, features={"user": users})
    call = next(steps)

    outputs = protocol.asked(call)["outputs"]
    assert [one["name"] for one in outputs] == list(layout.keys)
    sizes = [one["parameters"]["shared_memory_byte_size"] for one in outputs]
    assert sizes == [4 * WIDTH * users.size, 0, 4 * WIDTH * users.size]
    starts = [one["parameters"]["shared_memory_offset"] for one in outputs]
    assert starts[1:] == [starts[0] + sizes[0]] * 2


def test_of_more_keys_than_a_server_writes_none_is(calls: Calls) -> None:
    layout = Layout(tuple(f"k{at}" for at in range(65)), (WIDTH,) * 65)
    lengths = np.ones((65, EXAMPLES), np.int32)
    steps = lookup(calls)
    next(steps)
    steps.send(None)
    rows = np.zeros((65 * EXAMPLES, WIDTH), np.float32)
    ended(steps, EmbedResult(rows, layout, "sequence", 1, {}, lengths))

    assert path(next(lookup(calls))) == "/embed"


def test_where_tensors_lie(calls: Calls, protocol: Any) -> None:
    weights = {"user": [[0.5, 2.0], []], "movie": [[], [3.0]]}
    features = {"user": [[7, 8], []], "movie": [[], [9]]}
    wide = Layout(("user", "movie"), (WIDTH, 512 * WIDTH))
    learn(calls)
    steps = lookup(calls, features=features)
    assert path(next(steps)) == "/embed"
    ended(steps, embedded(layout=wide, examples=2))

    steps = lookup(calls, features=features, weights=weights)
    body = protocol.asked(next(steps))

    (file,) = files()
    data, told = file.read_bytes(), {}
    for one in body["inputs"]:
        place, dtype = one["parameters"], {"INT64": "<i8", "INT32": "<i4", "FP32": "<f4"}
        start = place["shared_memory_offset"]
        raw = data[start : start + place["shared_memory_byte_size"]]
        told[one["name"]] = np.frombuffer(raw, dtype[one["datatype"]]).tolist()
        assert one["shape"] == [len(told[one["name"]])]
        assert place["shared_memory_region"] == file.name
    assert told == {
        "user.ids": [7, 8],
        "user.lengths": [2, 0],
        "user.weights": [0.5, 2.0],
        "movie.ids": [9],
        "movie.lengths": [0, 1],
        "movie.weights": [3.0],
    }
    (output,) = body["outputs"]
    place = output["parameters"]
    assert (output["name"], place["shared_memory_offset"] % 64) == ("pooled", 0)
    assert place["shared_memory_byte_size"] == 2 * 4 * wide.width


@pytest.mark.parametrize("protocol", [Rest])
@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"outputs": [{"shape": [1]}]}'])
def test_a_body_that_is_no_answer(calls: RestRequests, body: bytes) -> None:
    learn(calls)
    call = next(lookup(calls))

    with pytest.raises(ServerError, match="is no inference"):
        call.result(httpx.Response(200, content=body))


@pytest.mark.parametrize("protocol", [Grpc])
@pytest.mark.parametrize("outputs", [[], [{"name": "pooled", "datatype": "FP32"}]])
def test_a_message_that_is_no_answer(calls: GrpcRequests, outputs: list[Any]) -> None:
    learn(calls)
    call = next(lookup(calls))

    answer = {"model_name": "shop", "model_version": "1", "outputs": outputs}
    with pytest.raises(ServerError, match="is no inference"):
        call.read(ParseDict(answer, pb.ModelInferResponse()))
