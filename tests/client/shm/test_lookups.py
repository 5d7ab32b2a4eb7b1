"""Tests of the calls of a lookup with shared memory, given the response to each call."""

from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from types import coroutine
from typing import Any, TypeAlias

import httpx
import numpy as np
import pytest
from client.shared_memory_protocols import PREFIX, PROTOCOLS, Calls, Grpc, Rest, path, protocol_of
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
from embedserve_client.grpc.requests import GrpcRequests
from embedserve_client.rest.requests import RestRequests
from embedserve_client.shm.lookups import CACHED_MODELS_MAX, VERSIONS_MAX
from embedserve_client.shm.protocol import SharedMemoryRejected
from embedserve_proto import open_inference_pb2 as pb

WIDTH = 128
EXAMPLES = 1024
USERS = np.arange(EXAMPLES)
LAYOUT = Layout(("user",), (WIDTH,))
Steps: TypeAlias = Generator[Any, Any, EmbedResult]
"""Calls of an attempt. The response to each is sent into the generator, or its error thrown."""


@pytest.fixture
def calls(protocol: Any) -> Iterator[Calls]:
    calls = protocol.make_requests()
    yield calls
    calls.close()
    assert files() == []


def files() -> list[Path]:
    return list(Path("/dev/shm").glob(f"{PREFIX[1:]}*"))


@coroutine
def send(call: Any) -> Generator[Any, Any, Any]:
    return (yield call)


def lookup(calls: Calls, **options: Any) -> Steps:
    given: dict[str, Any] = dict.fromkeys(
        ("model", "timeout_s", "weights", "routing_key", "min_seq")
    )
    given |= {"features": {"user": USERS}, "output_dtype": "float32", "output_keys": ()}
    operation = calls.embed(**given | options)
    return operation.attempt(send, operation.timeout_s).__await__()


def embed_result(
    version: int = 1, layout: Layout = LAYOUT, examples: int = EXAMPLES
) -> EmbedResult:
    """Returns the result of a call to /embed."""
    return EmbedResult(np.zeros((examples, layout.width), np.float32), layout, "shop", version)


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> Any:
    return PROTOCOLS[request.param]


def infer_result(call: Any, version: int = 1, width: int = WIDTH, **parameters: int) -> Any:
    """Returns the response to an inference; the server has written only the first number of the
    output."""
    protocol = protocol_of(call)
    (output,) = protocol.request_tensors(call)["outputs"]
    place = output["parameters"]
    file = Path("/dev/shm") / place["shared_memory_region"]
    with file.open("r+b") as opened:
        opened.seek(place["shared_memory_offset"])
        opened.write(np.float32(version).tobytes())
    shape = [EXAMPLES, width]
    location = {"shared_memory_region": place["shared_memory_region"]}
    output_fields = {"name": "pooled", "datatype": "FP32", "shape": shape, "parameters": location}
    answer = {"model_name": "shop", "model_version": str(version), "outputs": [output_fields]}
    return protocol.read_response(call, answer | {"parameters": parameters})


def result_of(steps: Steps, answer: Any) -> EmbedResult:
    try:
        call = steps.send(answer)
    except StopIteration as end:
        result: EmbedResult = end.value
        return result
    raise AssertionError(f"{path(call)} is asked for, too")


def look_up_first(calls: Calls, answer: EmbedResult | None = None, **options: Any) -> None:
    """Runs the first lookup, which registers a region and gets its vectors over /embed."""
    steps = lookup(calls, **options)
    assert path(next(steps)) == "register"
    assert path(steps.send(None)) == "/embed"
    result_of(steps, answer or embed_result())


def test_first_lookup_registers_a_region_and_the_next_uses_it(calls: Calls, protocol: Any) -> None:
    look_up_first(calls)
    steps = lookup(calls, routing_key="7")

    call = next(steps)
    result = result_of(steps, infer_result(call))

    assert (path(call), protocol.routing_key(call)) == ("/v2/models/shop/infer", "7")
    assert (result.model, result.version, result.values.shape) == ("shop", 1, (EXAMPLES, WIDTH))
    assert result.values[0, 0] == 1
    assert result.values.base is not None
    assert len(files()) == 1


def test_layouts_of_the_last_versions_are_cached(calls: Calls) -> None:
    look_up_first(calls)
    for version in (*range(2, VERSIONS_MAX + 2), 1):
        steps = lookup(calls)
        assert path(steps.send(infer_result(next(steps), version))) == "/embed"
        result_of(steps, embed_result(version))
    for version in (*range(3, VERSIONS_MAX + 2), 1):
        steps = lookup(calls)
        assert result_of(steps, infer_result(next(steps), version)).version == version


def test_layouts_of_another_server_or_model_are_forgotten(calls: Calls) -> None:
    look_up_first(calls)
    steps = lookup(calls)
    next(steps)
    assert path(steps.throw(SharedMemoryRejected(""))) == "/embed"  # by a server that restarted
    result_of(steps, embed_result(2))
    look_up_first(calls, embed_result(2))
    steps = lookup(calls)
    assert path(steps.send(infer_result(next(steps), 1))) == "/embed"
    result_of(steps, replace(embed_result(7), model="other"))
    steps = lookup(calls)
    assert path(steps.send(infer_result(next(steps), 2))) == "/embed"
    result_of(steps, embed_result(2))


def test_seq_is_read_from_the_parameters(calls: Calls) -> None:
    look_up_first(calls)
    for seq in (0, 1234):
        steps = lookup(calls)
        assert result_of(steps, infer_result(next(steps), seq=seq)).seq == seq
    steps = lookup(calls)
    assert result_of(steps, infer_result(next(steps))).seq is None


def test_id_counts_are_read_from_the_parameters(calls: Calls) -> None:
    look_up_first(calls)
    counts = {"missing_ids.user": 3, "unknown_ids.movie": 4}
    for name, of_name in (("missing_ids", {"user": 3}), ("unknown_ids", {"movie": 4})):
        for parameters, expected in ((counts, of_name), ({}, {})):
            steps = lookup(calls)
            assert (
                getattr(result_of(steps, infer_result(next(steps), **parameters)), name) == expected
            )


def test_model_name_is_sent_with_its_alias(calls: Calls) -> None:
    look_up_first(calls, model="shop@stable")

    assert path(next(lookup(calls, model="shop@stable"))) == "/v2/models/shop@stable/infer"


def test_first_lookup_of_a_new_version_is_repeated_over_embed(calls: Calls) -> None:
    look_up_first(calls)
    steps = lookup(calls)

    assert path(steps.send(infer_result(next(steps), version=2))) == "/embed"
    result_of(steps, embed_result(version=2))

    for version in (1, 2):
        steps = lookup(calls)
        assert result_of(steps, infer_result(next(steps), version)).version == version


def test_layouts_of_few_models_are_cached(calls: Calls) -> None:
    look_up_first(calls)
    for i in range(CACHED_MODELS_MAX):
        steps = lookup(calls, model=f"shop@{i}")
        assert path(next(steps)) == "/embed"
        result_of(steps, embed_result())
    assert path(next(lookup(calls))) == "/embed"


def test_vectors_of_unexpected_width_are_requested_again_over_embed(calls: Calls) -> None:
    look_up_first(calls)
    steps = lookup(calls)

    assert path(steps.send(infer_result(next(steps), width=WIDTH // 2))) == "/embed"


REJECTIONS = [
    (400, "output 'pooled' has 9 bytes, and its shared_memory_byte_size is 8"),
    (404, "shared memory region 'x' is not registered"),
    (413, "inputs has 7 bytes in shared memory, the limit is 6"),
]


@pytest.mark.parametrize(("status", "message"), REJECTIONS)
def test_rejected_inference_is_repeated_over_embed_and_drops_its_region(
    calls: Calls, status: int, message: str
) -> None:
    look_up_first(calls)
    steps = lookup(calls)
    error = error_of(next(steps), status, message)

    assert message in str(error)
    assert path(steps.throw(error)) == "/embed"
    assert files() == []
    result_of(steps, embed_result())

    # A server that forgot the region has been replaced: the client registers and calls /embed
    # again.
    look_up_first(calls)
    assert path(next(lookup(calls))) == "/v2/models/shop/infer"


def error_of(call: Any, status: int, message: str, **headers: str) -> EmbedServeClientError:
    protocol = protocol_of(call)
    error: EmbedServeClientError = protocol.error(call, status, message, **headers)
    return error


@pytest.mark.parametrize(
    "error", [DeadlineExceeded("late"), Unavailable("gone"), KeyboardInterrupt()]
)
def test_region_is_dropped_if_the_server_may_still_write_to_it(
    calls: Calls, error: BaseException
) -> None:
    look_up_first(calls)
    steps = lookup(calls)
    next(steps)

    with pytest.raises(type(error)):
        steps.throw(error)
    assert files() == []


def test_region_is_kept_when_the_server_is_overloaded(calls: Calls) -> None:
    look_up_first(calls)
    steps = lookup(calls)
    error = error_of(next(steps), 429, "the queue is full", **{"Retry-After": "3"})

    assert isinstance(error, Overloaded)
    assert (error.message, error.retry_after_s) == ("the queue is full", 3.0)
    with pytest.raises(Overloaded):
        steps.throw(error)
    assert path(next(lookup(calls))) == "/v2/models/shop/infer"


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (404, "no such route", "the server has no shared memory: it is started with --shared-mem"),
        (400, "key is '/x': it does not begin with '/y-'", "it does not begin with '/y-'"),
    ],
)
def test_server_without_shared_memory_or_with_another_prefix_raises(
    calls: Calls, status: int, message: str, expected: str
) -> None:
    steps = lookup(calls)
    error = error_of(next(steps), status, message)

    with pytest.raises(InvalidRequest, match=f"shared_memory is '{PREFIX}': .*{expected}"):
        steps.throw(error)
    assert error.field == "shared_memory"
    assert files() == []


@pytest.mark.parametrize("status", [401, 403, 409, 413])
def test_lookups_use_embed_if_registration_is_rejected(calls: Calls, status: int) -> None:
    for _ in range(2):
        steps = lookup(calls)
        error = error_of(next(steps), status, "256 regions of shared memory are registered")
        assert path(steps.throw(error)) == "/embed"
        result_of(steps, embed_result())
    assert files() == []


def test_server_that_is_loading_raises_its_own_message(calls: Calls) -> None:
    steps = lookup(calls)
    error = error_of(next(steps), 503, "the models are being loaded")

    with pytest.raises(Unavailable, match=r"^the models are being loaded$"):
        steps.throw(error)
    assert files() == []


WITHOUT_SHARED_MEMORY: list[dict[str, Any]] = [
    {"features": {"user": USERS[:8]}},
    {"output_keys": ["user"]},
    {"features": {"user": np.array(["a"] * EXAMPLES)}},
]


@pytest.mark.parametrize("options", WITHOUT_SHARED_MEMORY)
def test_small_string_and_output_key_lookups_use_embed(
    calls: Calls, options: dict[str, Any]
) -> None:
    look_up_first(calls)

    assert path(next(lookup(calls, **options))) == "/embed"


def test_each_key_of_an_unpooled_model_is_an_output(calls: Calls, protocol: Any) -> None:
    layout = Layout(("user@t_a", "tag", "user@t_b"), (WIDTH, WIDTH, WIDTH))
    lengths = np.array([[1] * EXAMPLES, [0] * EXAMPLES, [1] * EXAMPLES], np.int32)
    rows = np.zeros((2 * EXAMPLES, WIDTH), np.float32)
    look_up_first(calls, EmbedResult(rows, layout, "sequence", 1, {}, lengths))

    users = USERS[:512]
    steps = lookup(calls, features={"user": users})
    call = next(steps)

    outputs = protocol.request_tensors(call)["outputs"]
    assert [one["name"] for one in outputs] == list(layout.keys)
    sizes = [one["parameters"]["shared_memory_byte_size"] for one in outputs]
    assert sizes == [4 * WIDTH * users.size, 0, 4 * WIDTH * users.size]
    starts = [one["parameters"]["shared_memory_offset"] for one in outputs]
    assert starts[1:] == [starts[0] + sizes[0]] * 2


def test_unpooled_lookup_of_too_many_keys_uses_embed(calls: Calls) -> None:
    layout = Layout(tuple(f"k{at}" for at in range(65)), (WIDTH,) * 65)
    lengths = np.ones((65, EXAMPLES), np.int32)
    rows = np.zeros((65 * EXAMPLES, WIDTH), np.float32)
    look_up_first(calls, EmbedResult(rows, layout, "sequence", 1, {}, lengths))

    assert path(next(lookup(calls))) == "/embed"


def test_tensors_are_located_in_the_region_as_declared(calls: Calls, protocol: Any) -> None:
    weights = {"user": [[0.5, 2.0], []], "movie": [[], [3.0]]}
    features = {"user": [[7, 8], []], "movie": [[], [9]]}
    wide = Layout(("user", "movie"), (WIDTH, 512 * WIDTH))
    look_up_first(calls)
    steps = lookup(calls, features=features)
    assert path(next(steps)) == "/embed"
    result_of(steps, embed_result(layout=wide, examples=2))

    steps = lookup(calls, features=features, weights=weights)
    body = protocol.request_tensors(next(steps))

    (file,) = files()
    data, sent_tensors = file.read_bytes(), {}
    for one in body["inputs"]:
        place, dtype = one["parameters"], {"INT64": "<i8", "INT32": "<i4", "FP32": "<f4"}
        start = place["shared_memory_offset"]
        raw = data[start : start + place["shared_memory_byte_size"]]
        sent_tensors[one["name"]] = np.frombuffer(raw, dtype[one["datatype"]]).tolist()
        assert one["shape"] == [len(sent_tensors[one["name"]])]
        assert place["shared_memory_region"] == file.name
    assert sent_tensors == {
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
@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"outputs": [{"shape": [1]}]}', b"[" * 100_000]
)
def test_malformed_rest_response_raises_server_error(calls: RestRequests, body: bytes) -> None:
    look_up_first(calls)
    call = next(lookup(calls))
    with pytest.raises(ServerError, match="is no inference"):
        call.result(httpx.Response(200, content=body))


@pytest.mark.parametrize("protocol", [Grpc])
@pytest.mark.parametrize("outputs", [[], [{"name": "pooled", "datatype": "FP32"}]])
def test_malformed_grpc_response_raises_server_error(
    calls: GrpcRequests, outputs: list[Any]
) -> None:
    look_up_first(calls)
    call = next(lookup(calls))
    answer = {"model_name": "shop", "model_version": "1", "outputs": outputs}
    with pytest.raises(ServerError, match="is no inference"):
        call.read(ParseDict(answer, pb.ModelInferResponse()))
