"""Tests of tensors in shared memory, by the Open Inference Protocol over REST and gRPC.

The server reads ids from a region and writes vectors to it, for the caller who registered it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from server.fake_engine import Bags, FakeEngine
from server.fake_models import model_info, ruled_info, unpooled_info
from server.live import Live, make_pipeline, serving
from server.open_inference import LENGTH_HEADER, Input, jagged
from server.openapi import validate
from server.waiting import until

from embedserve.access.authenticator import Authenticator
from embedserve.access.grants import hash_of
from embedserve.config import Limits
from embedserve.pipeline import RequestPipeline
from embedserve.shared_memory.region_registry import EVERYBODY, RegionRegistry
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
class Placed:
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
                inputs.append(one.head | {"parameters": told(self.ids, self.ins[at])})
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
                    "parameters": told(self.vectors, place) | {"binary_data": False},
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
                tell(message.parameters, self.ids, self.ins[at])
            else:
                request.raw_input_contents.append(one.raw)
        for name, place in self.outs.items():
            output = request.outputs.add(name=name)
            if place is not None:
                tell(output.parameters, self.vectors, place)
        for name, value in self.parameters.items():
            request.parameters[name].string_param = value
        return request


def told(region: str, place: tuple[int, int]) -> dict[str, Any]:
    """Returns the parameters as Triton's clients send them, without an offset of 0."""
    at = {"shared_memory_offset": place[0]} if place[0] else {}
    return {"shared_memory_region": region, "shared_memory_byte_size": place[1]} | at


def tell(parameters: Any, region: str, place: tuple[int, int]) -> None:
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
Infer = Callable[[Live, Placed, str], Awaitable[Outputs]]


class RefusedRequestError(Exception):
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


async def post(live: Live, placed: Placed, model: str, *, is_binary: bool) -> Outputs:
    body, headers = placed.body(is_binary=is_binary)
    answer = await live.http.post(f"/v2/models/{model}/infer", content=body, headers=headers)
    if answer.status_code != 200:
        raise RefusedRequestError(answer.json()["error"], answer.status_code)
    return read_body(answer.content, answer.headers.get(LENGTH_HEADER))


async def as_json(live: Live, placed: Placed, model: str = "shop") -> Outputs:
    return await post(live, placed, model, is_binary=False)


async def as_binary(live: Live, placed: Placed, model: str = "shop") -> Outputs:
    return await post(live, placed, model, is_binary=True)


def stub(live: Live) -> GRPCInferenceServiceStub:
    return GRPCInferenceServiceStub(live.channel)


async def as_message(live: Live, placed: Placed, model: str = "shop") -> Outputs:
    try:
        return read_message(await stub(live).ModelInfer(placed.message(model)))
    except grpc.aio.AioRpcError as error:
        raise RefusedRequestError(str(error.details()), error.code().name) from None


async def as_stream(live: Live, placed: Placed, model: str = "shop") -> Outputs:
    requests = iter([placed.message(model)])
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


def exchange_over(
    engine: FakeEngine, executor: ThreadPoolExecutor, memory: Memory, limits: Limits | None = None
) -> RequestPipeline:
    others = FakeEngine(ruled_info()), FakeEngine(unpooled_info())
    shared = RegionRegistry("/", limits or Limits(), str(memory.folder))
    return make_pipeline(engine, *others, executor=executor, limits=limits, shared_memory=shared)


@pytest.fixture
async def live(
    engine: FakeEngine, executor: ThreadPoolExecutor, memory: Memory
) -> AsyncIterator[Live]:
    async with serving(exchange_over(engine, executor, memory)) as live:
        yield live


async def register(live: Live, memory: Memory) -> None:
    """Registers both files as regions, each from its offset to the end of the file."""
    for name, offset in (("ids", IDS_OFFSET), ("vectors", VECTORS_OFFSET)):
        size = (memory.folder / name).stat().st_size
        body = json.dumps({"key": f"/{name}", "offset": offset, "byte_size": size - offset})
        answer = await live.http.post(f"{REST}/region/{name}/register", content=body)
        assert (answer.status_code, answer.content) == (200, b""), answer.text


def places_of(expected: np.ndarray, keys: Sequence[str]) -> dict[str, tuple[int, int] | None]:
    """Returns room for each key, one after the other with some bytes between them."""
    places: dict[str, tuple[int, int] | None] = {}
    end = 0
    for key in keys:
        width = 9 if key == "pooled" else COLUMNS[key].stop - COLUMNS[key].start
        places[key] = (end, len(expected) * width * expected.itemsize)
        end += len(expected) * width * expected.itemsize + 4
    return places


def check(memory: Memory, placed: Placed, outputs: Outputs, expected: np.ndarray) -> None:
    """Checks the values in shared memory, and their location in the response."""
    assert set(outputs) == set(placed.outs)
    for name, place in placed.outs.items():
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
            "shared_memory_region": placed.vectors,
            "shared_memory_offset": place[0],
            "shared_memory_byte_size": wanted.nbytes,
        }
        read = memory.values((place[0], wanted.nbytes), expected.dtype)
        assert np.array_equal(read.reshape(wanted.shape), wanted)


# Results

KEYS = (("user",), ("tag", "user"), ("pooled",), ("pooled", "movie"))


@pytest.mark.parametrize("examples", [1, 3])
async def test_ids_are_read_from_and_vectors_written_to_regions(
    live: Live, engine: FakeEngine, memory: Memory, infer: Infer, examples: int
) -> None:
    bags = {name: one[:examples] for name, one in BAGS.items()}
    expected = engine.expected(bags)
    inputs = jagged(bags)
    ins = dict(enumerate(memory.put(inputs)))
    await register(live, memory)
    for keys in KEYS:
        placed = Placed(inputs, ins, places_of(expected, keys))
        for _ in range(2):
            check(memory, placed, await infer(live, placed, "shop"), expected)


async def test_inputs_may_mix_regions_and_body(
    live: Live, engine: FakeEngine, memory: Memory, infer: Infer
) -> None:
    expected, inputs = engine.expected(BAGS), jagged(BAGS)
    every = dict(enumerate(memory.put(inputs)))
    await register(live, memory)
    places = places_of(expected, tuple(COLUMNS))
    for ins in ({0: every[0]}, {1: every[1], 2: every[2]}, {3: every[3]}, {}):
        for inside in (("user",), ("movie", "tag"), ("tag",), ()):
            outs = {name: places[name] if name in inside else None for name in COLUMNS}
            placed = Placed(inputs, ins, outs)
            check(memory, placed, await infer(live, placed, "shop"), expected)
    answered = await infer(live, Placed(inputs, every), "shop")
    assert {name: one.place for name, one in answered.items()} == dict.fromkeys(COLUMNS)


async def test_large_regions_are_read_and_written_off_the_event_loop(
    executor: ThreadPoolExecutor, memory: Memory
) -> None:
    """Exceeds the inline limit: 2.4 MB of ids, nearly all padding, and 1.6 MB of vectors."""
    engine = FakeEngine(model_info("wide", {"user": (7, 2048), "tag": (5, 2048)}))
    numbers = range(100)
    bags: Bags = {"user": [[one % 7] for one in numbers], "tag": [[one % 5] for one in numbers]}
    expected = engine.expected(bags)
    inputs = [
        Input(name, "INT64", [[*bag, *[-1] * 1500] for bag in of_feature])
        for name, of_feature in bags.items()
    ]
    ins = dict(enumerate(memory.put(inputs)))
    nbytes = expected.nbytes // 2
    halves: dict[str, tuple[int, int] | None] = {"tag": (nbytes, nbytes), "user": (0, nbytes)}
    whole: dict[str, tuple[int, int] | None] = {"pooled": (0, 2 * nbytes)}
    async with serving(exchange_over(engine, executor, memory)) as live:
        await register(live, memory)
        for infer in (as_json, as_message):
            await infer(live, Placed(inputs, ins, whole), "wide")
            read = memory.values((0, expected.nbytes))
            assert np.array_equal(read, expected.ravel())
            await infer(live, Placed(inputs, ins, halves), "wide")
            read = memory.values((0, expected.nbytes))
            assert np.array_equal(read, np.stack(np.split(expected, 2, axis=1)).ravel())


async def test_requests_with_regions_are_not_cached_as_templates(
    live: Live, engine: FakeEngine, memory: Memory
) -> None:
    """Checks that no template is cached, since it would apply to the next caller, too."""
    expected, inputs = engine.expected(BAGS), jagged(BAGS)
    placed = Placed(inputs, {}, places_of(expected, ("user",)))
    await register(live, memory)
    check(memory, placed, await as_binary(live, placed), expected)
    await live.http.post(f"{REST}/unregister")
    for infer in (as_binary, as_message):
        with pytest.raises(RefusedRequestError, match="'vectors', which is not registered"):
            await infer(live, placed)


# Errors

INPUTS = jagged({"user": [[1, 2], []]})
INS = {0: (0, 16), 1: (16, 8)}
USER: dict[str, tuple[int, int] | None] = {"user": (0, 32)}
WRONG = [
    (Placed(INPUTS, INS, USER, ids="other"), 404, "'other', which is not registered"),
    (Placed(INPUTS, INS, USER, vectors="other"), 404, "output 'user' names shared memory"),
    (Placed(INPUTS, {0: (8, 16), 1: (24, 9)}, USER), 400, "9 bytes at 24 of .* which has 32$"),
    (Placed(INPUTS, {0: (0, 8), 1: (16, 8)}, USER), 400, "has 8 bytes, not 16$"),
    (Placed(INPUTS, {0: (2**62, 16)}, USER), 400, "16 bytes at 4611686018427387904 of shared"),
    (Placed(INPUTS, INS, {"user": (0, 31)}), 400, "has 32 bytes, and its shared_memory_byte_size"),
    (Placed(INPUTS, INS, {"user": (VECTORS_BYTES, 32)}), 400, "^output 'user' has 32 bytes at"),
    (Placed(INPUTS, INS, {"user": (0, 32), "nothing": (0, 1)}), 400, "is 'nothing': model 'shop'"),
    (Placed(INPUTS, INS, {"user": (0, 32), "movie": (0, 1)}), 400, "^output 'movie' has 24 bytes"),
    (
        Placed(INPUTS, INS, {f"k{i}": (0, 1) for i in range(65)}),
        413,
        "65 are requested in shared memory, the limit is 64",
    ),
]
CODES = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 413: "RESOURCE_EXHAUSTED"}


async def test_invalid_region_parameters_are_rejected_without_a_write(
    live: Live, memory: Memory
) -> None:
    memory.put(INPUTS)
    await register(live, memory)
    for placed, status, said in WRONG:
        for infer, told in ((as_json, status), (as_message, CODES[status])):
            with pytest.raises(RefusedRequestError, match=said) as caught:
                await infer(live, placed)
            assert caught.value.status == told
    assert memory.is_untouched()


async def test_incomplete_or_extra_region_parameters_are_rejected(
    live: Live, memory: Memory
) -> None:
    memory.put(INPUTS)
    await register(live, memory)
    body = json.loads(Placed(INPUTS, INS, USER).body(is_binary=False)[0])
    for change, said in (
        ({"parameters": {"shared_memory_region": "ids"}}, "has shared_memory_region and no shared"),
        ({"parameters": {"shared_memory_byte_size": 1}}, "has shared_memory_byte_size and no shar"),
        ({"data": [1, 2]}, "has both data and a region of shared memory: send one"),
        ({"parameters": told("ids", (-1, 16))}, "body is not an inference request: Expected"),
    ):
        changed = body | {"inputs": [body["inputs"][0] | change, body["inputs"][1]]}
        answer = await live.http.post("/v2/models/shop/infer", json=changed)
        assert (answer.status_code, said in answer.json()["error"]) == (400, True), answer.text
    message = Placed(INPUTS, INS, USER).message("shop")
    message.inputs[0].contents.int64_contents.extend([1, 2])
    with pytest.raises(grpc.aio.AioRpcError, match="has both contents and a region"):
        await stub(live).ModelInfer(message)
    message = Placed(INPUTS, {0: (0, 16)}, USER).message("shop")
    message.raw_input_contents.append(b"")
    with pytest.raises(grpc.aio.AioRpcError, match="has 2 entries for 1 inputs"):
        await stub(live).ModelInfer(message)
    message = Placed(INPUTS, INS, USER).message("shop")
    message.inputs[0].parameters["shared_memory_offset"].int64_param = -8
    with pytest.raises(grpc.aio.AioRpcError, match="16 bytes at -8 of shared memory region 'ids'"):
        await stub(live).ModelInfer(message)


@pytest.mark.parametrize("name", ["ids", "vectors"])
async def test_truncated_or_removed_region_files_are_errors(
    live: Live, engine: FakeEngine, memory: Memory, name: str
) -> None:
    memory.put(INPUTS)
    await register(live, memory)
    path = memory.folder / name
    acts: list[tuple[Callable[[], None], str]] = [
        (lambda: os.truncate(path, 16), "cut to 16 bytes"),
        (path.unlink, "removed"),
    ]
    for act, said in acts:
        act()
        for infer in (as_json, as_message):
            with pytest.raises(RefusedRequestError, match=f"{name!r}: its file was {said}"):
                await infer(live, Placed(INPUTS, INS, USER))
            bags: Bags = {"user": [[1]]}
            plain = Placed(jagged(bags), {}, {"user": None})
            check(memory, plain, await infer(live, plain), engine.expected(bags))


async def test_region_unregistered_while_a_request_waits_is_an_error(
    engine: FakeEngine, executor: ThreadPoolExecutor, memory: Memory
) -> None:
    pipeline = exchange_over(engine, executor, memory, Limits(inline_bytes_max=0))
    memory.put(INPUTS)
    async with serving(pipeline) as live:
        await register(live, memory)
        engine.hold()
        waiting = asyncio.create_task(as_message(live, Placed(INPUTS, INS, USER)))
        await until(lambda: engine.lookups)
        await live.http.post(f"{REST}/unregister")
        engine.release()
        with pytest.raises(RefusedRequestError, match="'vectors': it is not registered any more"):
            await waiting
    assert memory.is_untouched()


async def test_region_reads_are_limited_like_bodies(
    engine: FakeEngine, executor: ThreadPoolExecutor, memory: Memory
) -> None:
    limits = Limits(body_bytes_max=1000, request_text_bytes_max=500)
    memory.ids.write_bytes(bytes(IDS_OFFSET + 600))
    async with serving(exchange_over(engine, executor, memory, limits)) as live:
        await register(live, memory)
        twice = [Input("user.ids", "INT64", [], [75]), Input("tag.ids", "INT64", [], [75])]
        for inputs, said in (
            (twice, "^inputs has 1200 bytes in shared memory, the limit is 1000"),
            (
                [Input("user.ids", "BYTES", [], [1])],
                "^inputs has 600 bytes of strings in shared memory, the limit is 500",
            ),
        ):
            placed = Placed(inputs, dict.fromkeys(range(len(inputs)), (0, 600)))
            with pytest.raises(RefusedRequestError, match=said) as caught:
                await as_message(live, placed)
            assert caught.value.status == "RESOURCE_EXHAUSTED"


# Registration and owners


async def test_region_status_is_equal_over_rest_and_grpc(live: Live, memory: Memory) -> None:
    get, calls = live.http.get, stub(live)
    extensions = (await get("/v2")).json()["extensions"]
    assert "system_shared_memory" in extensions
    server = await calls.ServerMetadata(pb.ServerMetadataRequest())
    assert list(server.extensions) == extensions
    assert (await get(f"{REST}/status")).json() == []
    await register(live, memory)
    ids = {"name": "ids", "key": "/ids", "offset": IDS_OFFSET, "byte_size": 0}
    ids["byte_size"] = memory.ids.stat().st_size - IDS_OFFSET
    assert (await get(f"{REST}/region/ids/status")).json() == [ids]
    assert [one["name"] for one in (await get(f"{REST}/status")).json()] == ["ids", "vectors"]
    status = await calls.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(name="ids"))
    (one,) = status.regions.values()
    told = {"name": one.name, "key": one.key, "offset": one.offset, "byte_size": one.byte_size}
    assert (list(status.regions), told) == (["ids"], ids)
    asked = pb.SystemSharedMemoryUnregisterRequest(name="ids")
    await calls.SystemSharedMemoryUnregister(asked)
    await calls.SystemSharedMemoryRegister(
        pb.SystemSharedMemoryRegisterRequest(name="more", key="ids", byte_size=8)
    )
    status = await calls.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())
    assert set(status.regions) == {"more", "vectors"}
    assert (await live.http.post(f"{REST}/region/more/unregister")).status_code == 200
    await calls.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())
    assert (await get(f"{REST}/status")).json() == []


async def test_invalid_registration_is_rejected(live: Live, memory: Memory) -> None:
    path = f"{REST}/region/ids/register"
    right = {"key": "ids", "offset": 0, "byte_size": 1}
    for body, status, said in (
        (b"", 400, "body: Invalid JSON"),
        (b"[]", 400, "body: "),
        (json.dumps(right | {"byte_size": "1"}), 400, "body.byte_size: "),
        (json.dumps({"key": "ids", "offset": 0}), 400, "body.byte_size: Field required"),
        (json.dumps(right | {"key": "../ids"}), 400, "key is '../ids': it is no name of a file"),
        (json.dumps(right | {"byte_size": 2**40}), 413, "byte_size is 1099511627776, all callers'"),
        (b" " * 5000, 413, "body has at least 5000 bytes, the limit is 4096"),
    ):
        answer = await live.http.post(path, content=body)
        assert (answer.status_code, said in answer.json()["error"]) == (status, True), answer.text
    assert (await live.http.post(path, json=right)).status_code == 200
    assert (await live.http.post(path, json=right)).status_code == 409
    assert (await live.http.get(f"{REST}/region/other/status")).status_code == 404
    call = stub(live).SystemSharedMemoryRegister
    with pytest.raises(grpc.aio.AioRpcError, match="key is '': it is no name") as caught:
        await call(pb.SystemSharedMemoryRegisterRequest(name="more", byte_size=1))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError, match="is registered already") as caught:
        await call(pb.SystemSharedMemoryRegisterRequest(name="ids", key="ids", byte_size=1))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    described = (await live.http.get("/openapi.json")).json()
    operation = described["paths"][f"{REST}/region/{{region}}/register"]["post"]
    assert {"200", "400", "403", "409", "413", "default"} <= set(operation["responses"])
    validate((await live.http.get(f"{REST}/status")).json()[0], "RegionStatus", described)


async def test_browser_pages_cannot_use_regions(live: Live, memory: Memory) -> None:
    memory.put(INPUTS)
    await register(live, memory)
    page = {"Origin": "http://elsewhere.example"}
    for path in ("status", "region/ids/status"):
        assert (await live.http.get(f"{REST}/{path}", headers=page)).status_code == 403
    for path in ("unregister", "region/ids/unregister", "region/more/register"):
        assert (await live.http.post(f"{REST}/{path}", headers=page)).status_code == 403
    for is_binary in (False, True):
        body, headers = Placed(INPUTS, INS, USER).body(is_binary=is_binary)
        answer = await live.http.post("/v2/models/shop/infer", content=body, headers=headers | page)
        assert answer.status_code == 404
    assert memory.is_untouched()


async def test_region_of_a_removed_file_is_dropped(live: Live, memory: Memory) -> None:
    await register(live, memory)
    shared = live.pipeline.shared_memory
    assert shared is not None
    memory.ids.unlink()
    await until(lambda: list(shared.of(EVERYBODY)) == ["vectors"])


TOKENS: dict[str, dict[str, Any]] = {"es_a": {}, "es_b": {}, "es_boss": {"roles": ["admin"]}}


def written(path: Path, **changes: dict[str, Any]) -> None:
    tokens = {token: keys | changes.get(token, {}) for token, keys in TOKENS.items()}
    lines = [
        json.dumps({"name": token[3:], "sha256": hash_of(token.encode()), **keys})
        for token, keys in tokens.items()
    ]
    path.write_text("\n".join(lines))


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if token else {}


@pytest.mark.parametrize("management_host", ["", "127.0.0.1"])
async def test_regions_are_separate_by_caller(
    engine: FakeEngine,
    executor: ThreadPoolExecutor,
    memory: Memory,
    tmp_path: Path,
    management_host: str,
) -> None:
    tokens = tmp_path / "tokens"
    written(tokens)
    access = Authenticator(str(tokens))
    shared = RegionRegistry("/", Limits(), str(memory.folder))
    pipeline = make_pipeline(engine, executor=executor, authenticator=access, shared_memory=shared)
    memory.put(INPUTS)
    bodies = {
        name: json.dumps({"key": name, "offset": offset, "byte_size": 24})
        for name, offset in (("ids", IDS_OFFSET), ("vectors", VECTORS_OFFSET))
    }
    infer, _ = Placed(INPUTS, INS, {"user": None}).body(is_binary=False)
    async with serving(pipeline, management_host=management_host) as live:

        async def status_of(token: str, method: str, path: str, body: Any = b"") -> int:
            headers = bearer(token)
            answer = await live.http.request(method, path, content=body, headers=headers)
            return answer.status_code

        ids = f"{REST}/region/ids"
        refused = {"": 401, "es_boss": 403}
        for token, wanted in (refused | {"es_a": 200}).items():
            assert await status_of(token, "POST", f"{ids}/register", bodies["ids"]) == wanted
            assert await status_of(token, "GET", f"{REST}/status") == wanted
        assert await status_of("es_a", "POST", "/v2/models/shop/infer", infer) == 200
        assert await status_of("es_b", "POST", "/v2/models/shop/infer", infer) == 404
        assert await status_of("es_b", "GET", f"{ids}/status") == 404
        assert await status_of("es_b", "POST", f"{ids}/register", bodies["ids"]) == 409
        assert await status_of("es_b", "POST", f"{ids}/unregister") == 200
        assert await status_of("es_b", "POST", f"{REST}/unregister") == 200
        assert await status_of("es_b", "POST", f"{ids}/register", bodies["vectors"]) == 200
        calls = stub(live)
        for token, wanted_code in (("", "UNAUTHENTICATED"), ("es_boss", "PERMISSION_DENIED")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await calls.SystemSharedMemoryStatus(
                    pb.SystemSharedMemoryStatusRequest(), metadata=tuple(bearer(token).items())
                )
            assert caught.value.code().name == wanted_code
        for token, key in (("es_a", "ids"), ("es_b", "vectors")):
            metadata = tuple(bearer(token).items())
            status = await calls.SystemSharedMemoryStatus(
                pb.SystemSharedMemoryStatusRequest(), metadata=metadata
            )
            assert [one.key for one in status.regions.values()] == [key]
        written(tokens, es_a={"revoked": True})
        await access.reloader.poll()
        await until(lambda: not shared.of("a"))
        assert list(shared.of("b")) == ["ids"]
        assert await status_of("es_b", "POST", f"{REST}/region/a/register", bodies["ids"]) == 200


async def test_regions_are_rejected_without_shared_memory(
    engine: FakeEngine, executor: ThreadPoolExecutor, memory: Memory
) -> None:
    async with serving(make_pipeline(engine, executor=executor)) as live:
        assert "system_shared_memory" not in (await live.http.get("/v2")).json()["extensions"]
        assert (await live.http.get(f"{REST}/status")).status_code == 404
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(live).SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        for infer in (as_json, as_message):
            for placed in (Placed(INPUTS, INS), Placed(INPUTS, {}, USER)):
                with pytest.raises(RefusedRequestError, match=r"not use \(--shared-memory\)$"):
                    await infer(live, placed)
