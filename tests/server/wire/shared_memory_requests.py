"""Requests with tensors in shared memory, and the results that they read back."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from server.fake_engine import Bags, FakeEngine
from server.fake_models import ruled_info, unpooled_info
from server.live import Live, make_pipeline, serving
from server.open_inference import LENGTH_HEADER, Input, jagged

from embedserve.config import Limits
from embedserve.pipeline import RequestPipeline
from embedserve.shared_memory.region_registry import RegionRegistry
from embedserve_proto import open_inference_pb2 as pb
from embedserve_proto.open_inference_pb2_grpc import GRPCInferenceServiceStub

BAGS: Bags = {"tag": [[1], [2, 3], []], "user": [[4], [], [6]]}
COLUMNS = {"user": slice(0, 4), "movie": slice(4, 7), "tag": slice(7, 9)}
IDS_OFFSET, VECTORS_OFFSET = 16, 64
VECTORS_BYTES = 4 << 20
REST = "/v2/systemsharedmemory"


class Memory:
    """A folder in place of /dev/shm, with a file for ids and one for vectors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ids, self.vectors = folder / "ids", folder / "vectors"
        self.ids.write_bytes(bytes(IDS_OFFSET + 8))
        self.vectors.write_bytes(bytes(VECTORS_OFFSET + VECTORS_BYTES))

    def put(self, inputs: Sequence[Input]) -> list[tuple[int, int]]:
        """Writes the inputs; returns (offset in the region, bytes) of each."""
        places, data = [], b""
        for one in inputs:
            places.append((len(data), len(one.raw)))
            data += one.raw
        self.ids.write_bytes(bytes(IDS_OFFSET) + data + b"\xff" * 8)
        return places

    def values(self, place: tuple[int, int], dtype: Any = "<f4") -> np.ndarray:
        start = VECTORS_OFFSET + place[0]
        return np.frombuffer(self.vectors.read_bytes()[start : start + place[1]], dtype)

    def is_untouched(self) -> bool:
        return not any(self.vectors.read_bytes())


@dataclass
class SharedMemoryRequest:
    """A request with some of its tensors in shared memory.

    Attributes:
        inputs: all inputs.
        ins: location of each input that is in shared memory, by position.
        outs: location of each output, by name; None: the output is in the response.
    """

    inputs: Sequence[Input]
    ins: Mapping[int, tuple[int, int]]
    outs: Mapping[str, tuple[int, int] | None] = field(default_factory=dict)
    ids: str = "ids"
    vectors: str = "vectors"
    parameters: Mapping[str, str] = field(default_factory=dict)

    def body(self, *, is_binary: bool) -> tuple[bytes, dict[str, str]]:
        inputs, rest = [], b""
        for at, one in enumerate(self.inputs):
            if at in self.ins:
                inputs.append(one.head | {"parameters": region_parameters(self.ids, self.ins[at])})
            elif is_binary:
                inputs.append(one.head | {"parameters": {"binary_data_size": len(one.raw)}})
                rest += one.raw
            else:
                inputs.append(one.head | {"data": one.values})
        parameters = {"binary_data_output": is_binary} | dict(self.parameters)
        body: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
        if self.outs:
            body["outputs"] = [
                {"name": name}
                if place is None
                else {
                    "name": name,
                    "parameters": region_parameters(self.vectors, place) | {"binary_data": False},
                }
                for name, place in self.outs.items()
            ]
        head = json.dumps(body).encode()
        return head + rest, {LENGTH_HEADER: str(len(head))} if is_binary else {}

    def message(self, model: str) -> pb.ModelInferRequest:
        request = pb.ModelInferRequest(model_name=model)
        for at, one in enumerate(self.inputs):
            message = request.inputs.add(name=one.name, datatype=one.datatype, shape=one.sizes)
            if at in self.ins:
                set_region_parameters(message.parameters, self.ids, self.ins[at])
            else:
                request.raw_input_contents.append(one.raw)
        for name, place in self.outs.items():
            output = request.outputs.add(name=name)
            if place is not None:
                set_region_parameters(output.parameters, self.vectors, place)
        for name, value in self.parameters.items():
            request.parameters[name].string_param = value
        return request


def region_parameters(region: str, place: tuple[int, int]) -> dict[str, Any]:
    """Returns the parameters as Triton's clients send them, without an offset of 0."""
    at = {"shared_memory_offset": place[0]} if place[0] else {}
    return {"shared_memory_region": region, "shared_memory_byte_size": place[1]} | at


def set_region_parameters(parameters: Any, region: str, place: tuple[int, int]) -> None:
    parameters["shared_memory_region"].string_param = region
    parameters["shared_memory_byte_size"].int64_param = place[1]
    if place[0]:
        parameters["shared_memory_offset"].int64_param = place[0]


@dataclass
class Output:
    """An output of a response: its location in shared memory, or its values in the response."""

    shape: list[int]
    place: dict[str, Any] | None
    values: np.ndarray | None


Outputs = dict[str, Output]
Infer = Callable[[Live, SharedMemoryRequest, str], Awaitable[Outputs]]


class RejectedRequestError(Exception):
    """A request was rejected, with this message and status."""

    def __init__(self, message: str, status: int | str) -> None:
        super().__init__(message)
        self.status = status


def read_body(body: bytes, head_bytes: str | None) -> Outputs:
    end = len(body) if head_bytes is None else int(head_bytes)
    outputs, rest = {}, body[end:]
    for one in json.loads(body[:end])["outputs"]:
        parameters = one.get("parameters", {})
        values = None
        if "binary_data_size" in parameters:
            size = parameters.pop("binary_data_size")
            values, rest = np.frombuffer(rest[:size], "<f4"), rest[size:]
        elif "data" in one:
            values = np.array(one["data"], np.float32)
        outputs[one["name"]] = Output(one["shape"], parameters or None, values)
    assert rest == b""
    return outputs


def read_message(message: pb.ModelInferResponse) -> Outputs:
    outputs = {}
    for one, raw in zip(message.outputs, message.raw_output_contents, strict=True):
        place = None
        if one.parameters:
            place = {
                "shared_memory_region": one.parameters["shared_memory_region"].string_param,
                "shared_memory_offset": one.parameters["shared_memory_offset"].int64_param,
                "shared_memory_byte_size": one.parameters["shared_memory_byte_size"].int64_param,
            }
        values = None if place else np.frombuffer(raw, "<f4")
        assert raw == b"" or place is None
        outputs[one.name] = Output(list(one.shape), place, values)
    return outputs


async def post(
    live: Live, infer_request: SharedMemoryRequest, model: str, *, is_binary: bool
) -> Outputs:
    body, headers = infer_request.body(is_binary=is_binary)
    answer = await live.http.post(f"/v2/models/{model}/infer", content=body, headers=headers)
    if answer.status_code != 200:
        raise RejectedRequestError(answer.json()["error"], answer.status_code)
    return read_body(answer.content, answer.headers.get(LENGTH_HEADER))


async def as_json(live: Live, infer_request: SharedMemoryRequest, model: str = "shop") -> Outputs:
    return await post(live, infer_request, model, is_binary=False)


async def as_binary(live: Live, infer_request: SharedMemoryRequest, model: str = "shop") -> Outputs:
    return await post(live, infer_request, model, is_binary=True)


def stub(live: Live) -> GRPCInferenceServiceStub:
    return GRPCInferenceServiceStub(live.channel)


async def as_message(
    live: Live, infer_request: SharedMemoryRequest, model: str = "shop"
) -> Outputs:
    try:
        return read_message(await stub(live).ModelInfer(infer_request.message(model)))
    except grpc.aio.AioRpcError as error:
        raise RejectedRequestError(str(error.details()), error.code().name) from None


async def as_stream(live: Live, infer_request: SharedMemoryRequest, model: str = "shop") -> Outputs:
    requests = iter([infer_request.message(model)])
    (answer,) = [one async for one in stub(live).ModelStreamInfer(requests)]
    assert answer.error_message == ""
    return read_message(answer.infer_response)


FORMS: Mapping[str, Infer] = {
    one.__name__: one for one in (as_json, as_binary, as_message, as_stream)
}


@pytest.fixture(params=FORMS)
def infer(request: pytest.FixtureRequest) -> Infer:
    return FORMS[request.param]


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    folder = tmp_path / "shm"
    folder.mkdir()
    return Memory(folder)


def pipeline_over(
    engine: FakeEngine, executor: ThreadPoolExecutor, memory: Memory, limits: Limits | None = None
) -> RequestPipeline:
    others = FakeEngine(ruled_info()), FakeEngine(unpooled_info())
    shared = RegionRegistry("/", limits or Limits(), str(memory.folder))
    return make_pipeline(engine, *others, executor=executor, limits=limits, shared_memory=shared)


@pytest.fixture
async def live(
    engine: FakeEngine, executor: ThreadPoolExecutor, memory: Memory
) -> AsyncIterator[Live]:
    async with serving(pipeline_over(engine, executor, memory)) as live:
        yield live


async def register(live: Live, memory: Memory) -> None:
    """Registers both files as regions, each from its offset to the end of the file."""
    for name, offset in (("ids", IDS_OFFSET), ("vectors", VECTORS_OFFSET)):
        size = (memory.folder / name).stat().st_size
        body = json.dumps({"key": f"/{name}", "offset": offset, "byte_size": size - offset})
        response = await live.http.post(f"{REST}/region/{name}/register", content=body)
        assert (response.status_code, response.content) == (200, b""), response.text


def places_of(expected: np.ndarray, keys: Sequence[str]) -> dict[str, tuple[int, int] | None]:
    """Returns room for each key, one after the other with some bytes between them."""
    places: dict[str, tuple[int, int] | None] = {}
    end = 0
    for key in keys:
        width = 9 if key == "pooled" else COLUMNS[key].stop - COLUMNS[key].start
        places[key] = (end, len(expected) * width * expected.itemsize)
        end += len(expected) * width * expected.itemsize + 4
    return places


def check(
    memory: Memory, infer_request: SharedMemoryRequest, outputs: Outputs, expected: np.ndarray
) -> None:
    """Checks the values in shared memory, and their location in the response."""
    assert set(outputs) == set(infer_request.outs)
    for name, place in infer_request.outs.items():
        columns = COLUMNS.get(name, slice(None))
        wanted = expected[:, columns]
        output = outputs[name]
        assert output.shape == list(wanted.shape)
        if place is None:
            assert output.place is None
            assert output.values is not None
            assert np.array_equal(output.values.reshape(wanted.shape), wanted)
            continue
        assert output.values is None
        assert output.place == {
            "shared_memory_region": infer_request.vectors,
            "shared_memory_offset": place[0],
            "shared_memory_byte_size": wanted.nbytes,
        }
        read = memory.values((place[0], wanted.nbytes), expected.dtype)
        assert np.array_equal(read.reshape(wanted.shape), wanted)


INPUTS = jagged({"user": [[1, 2], []]})
INS = {0: (0, 16), 1: (16, 8)}
USER: dict[str, tuple[int, int] | None] = {"user": (0, 32)}
