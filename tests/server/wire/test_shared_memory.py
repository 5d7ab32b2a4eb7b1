"""Tests of tensors in shared memory over REST and gRPC: results and errors.

The server reads ids from a region and writes vectors to it, for the caller who registered it.
"""

import asyncio
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from server.fake_engine import Bags, FakeEngine
from server.fake_models import model_info
from server.gate import Gate
from server.live import Live, serving
from server.open_inference import Input, Place, jagged
from server.waiting import until
from server.wire.inference_requests import (
    BAGS,
    COLUMNS,
    Infer,
    RejectedRequestError,
    as_binary,
    as_json,
    as_raw,
    infer,
    stub,
)
from server.wire.shared_memory_requests import (
    IDS_OFFSET,
    INPUTS,
    INS,
    REST,
    USER,
    VECTORS_BYTES,
    Memory,
    check,
    in_regions,
    live,
    memory,
    pipeline_over,
    places_of,
    register,
)

from embedserve.codec import json_codec
from embedserve.config import Limits
from embedserve.shared_memory.region import Region

__all__ = ["infer", "live", "memory"]

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
        infer_request = in_regions(inputs, ins, places_of(expected, keys))
        for _ in range(2):
            check(memory, infer_request, await infer(live, infer_request, "shop"), expected)


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
            infer_request = in_regions(inputs, ins, outs)
            check(memory, infer_request, await infer(live, infer_request, "shop"), expected)
    response = await infer(live, in_regions(inputs, every), "shop")
    assert list(response.outputs) == list(COLUMNS)
    assert response.shared == {}


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
    async with serving(pipeline_over(engine, executor, memory)) as live:
        await register(live, memory)
        for infer in (as_json, as_raw):
            await infer(live, in_regions(inputs, ins, whole), "wide")
            read = memory.values((0, expected.nbytes))
            assert np.array_equal(read, expected.ravel())
            await infer(live, in_regions(inputs, ins, halves), "wide")
            read = memory.values((0, expected.nbytes))
            assert np.array_equal(read, np.stack(np.split(expected, 2, axis=1)).ravel())


async def test_requests_with_regions_are_not_cached_as_templates(
    live: Live, engine: FakeEngine, memory: Memory
) -> None:
    """Checks that no template is cached, since it would apply to the next caller, too."""
    expected, inputs = engine.expected(BAGS), jagged(BAGS)
    infer_request = in_regions(inputs, {}, places_of(expected, ("user",)))
    await register(live, memory)
    check(memory, infer_request, await as_binary(live, infer_request), expected)
    await live.http.post(f"{REST}/unregister")
    for send in (as_binary, as_raw):
        with pytest.raises(RejectedRequestError, match="'vectors', which is not registered"):
            await send(live, infer_request)


# Errors

WRONG = [
    (in_regions(INPUTS, INS, USER, ids="other"), 404, "'other', which is not registered"),
    (
        in_regions(INPUTS, INS, USER, vectors="other"),
        404,
        "output 'user' names shared memory",
    ),
    (
        in_regions(INPUTS, {0: (8, 16), 1: (24, 9)}, USER),
        400,
        "9 bytes at 24 of .* which has 32$",
    ),
    (in_regions(INPUTS, {0: (0, 8), 1: (16, 8)}, USER), 400, "has 8 bytes, not 16$"),
    (
        in_regions(INPUTS, {0: (2**62, 16)}, USER),
        400,
        "16 bytes at 4611686018427387904 of shared",
    ),
    (
        in_regions(INPUTS, INS, {"user": (0, 32), "tag": (28, 40)}),
        400,
        "outputs 'user' and 'tag' overlap in shared memory",
    ),
    (
        in_regions(INPUTS, INS, {"user": (0, 31)}),
        400,
        "has 32 bytes, and its shared_memory_byte_size",
    ),
    (
        in_regions(INPUTS, INS, {"user": (VECTORS_BYTES, 32)}),
        400,
        "^output 'user' has 32 bytes at",
    ),
    (
        in_regions(INPUTS, INS, {"user": (0, 32), "nothing": (0, 1)}),
        400,
        "is 'nothing': model 'shop'",
    ),
    (
        in_regions(INPUTS, INS, {"user": (0, 32), "movie": (0, 1)}),
        400,
        "^output 'movie' has 24 bytes",
    ),
    (
        in_regions(INPUTS, INS, {f"k{i}": (0, 1) for i in range(65)}),
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
    for infer_request, status, expected_error in WRONG:
        for send, code in ((as_json, status), (as_raw, CODES[status])):
            with pytest.raises(RejectedRequestError, match=expected_error) as caught:
                await send(live, infer_request)
            assert caught.value.status == code
    assert memory.is_untouched()


async def test_incomplete_or_extra_region_parameters_are_rejected(
    live: Live, memory: Memory
) -> None:
    memory.put(INPUTS)
    await register(live, memory)
    body = json.loads(in_regions(INPUTS, INS, USER).json_body())
    for change, expected_error in (
        ({"parameters": {"shared_memory_region": "ids"}}, "has shared_memory_region and no shared"),
        ({"parameters": {"shared_memory_byte_size": 1}}, "has shared_memory_byte_size and no shar"),
        ({"data": [1, 2]}, "has both data and a region of shared memory: send one"),
        (
            {"parameters": Place("ids", -1, 16).parameters},
            "body is not an inference request: Expected",
        ),
    ):
        changed = body | {"inputs": [body["inputs"][0] | change, body["inputs"][1]]}
        answer = await live.http.post("/v2/models/shop/infer", json=changed)
        assert (answer.status_code, expected_error in answer.json()["error"]) == (400, True), (
            answer.text
        )
    message = in_regions(INPUTS, INS, USER).message("shop", is_raw=True)
    message.inputs[0].contents.int64_contents.extend([1, 2])
    with pytest.raises(grpc.aio.AioRpcError, match="has both contents and a region"):
        await stub(live).ModelInfer(message)
    message = in_regions(INPUTS, {0: (0, 16)}, USER).message("shop", is_raw=True)
    message.raw_input_contents.append(b"")
    with pytest.raises(grpc.aio.AioRpcError, match="has 2 entries for 1 inputs"):
        await stub(live).ModelInfer(message)
    message = in_regions(INPUTS, INS, USER).message("shop", is_raw=True)
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
    for act, expected_error in acts:
        act()
        for send in (as_json, as_raw):
            with pytest.raises(
                RejectedRequestError, match=f"{name!r}: its file was {expected_error}"
            ):
                await send(live, in_regions(INPUTS, INS, USER))
            bags: Bags = {"user": [[1]]}
            plain = in_regions(jagged(bags), {}, {"user": None})
            check(memory, plain, await send(live, plain), engine.expected(bags))


async def test_region_unregistered_while_a_request_waits_is_an_error(
    engine: FakeEngine, executor: ThreadPoolExecutor, memory: Memory
) -> None:
    pipeline = pipeline_over(engine, executor, memory, Limits(inline_bytes_max=0))
    memory.put(INPUTS)
    async with serving(pipeline) as live:
        await register(live, memory)
        engine.hold()
        waiting = asyncio.create_task(as_raw(live, in_regions(INPUTS, INS, USER)))
        await until(lambda: engine.lookups)
        await live.http.post(f"{REST}/unregister")
        engine.release()
        with pytest.raises(RejectedRequestError, match="'vectors': it is not registered any more"):
            await waiting
    assert memory.is_untouched()


async def test_other_requests_are_served_while_a_write_to_a_region_waits(
    live: Live,
    engine: FakeEngine,
    memory: Memory,
    infer: Infer,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against the kernel's lock of the file: its owner holds it in fallocate, for example,
    for as long as that takes."""
    memory.put(INPUTS)
    await register(live, memory)
    monkeypatch.setattr(Region, "write", gate.before(Region.write))
    infer_request = in_regions(INPUTS, INS, USER)
    waiting = asyncio.ensure_future(infer(live, infer_request, "shop"))
    await until(lambda: gate.threads)
    for count in (1, json_codec.INLINE_JSON_BYTES_MAX):  # the codec thread decodes the second
        answer = await live.http.post("/embed", json={"features": {"user": [1] * count}})
        assert answer.status_code == 200, answer.text
    gate.opened.set()
    check(memory, infer_request, await waiting, engine.expected({"user": [[1, 2], []]}))


async def test_region_reads_are_limited_like_bodies(
    engine: FakeEngine, executor: ThreadPoolExecutor, memory: Memory
) -> None:
    limits = Limits(body_bytes_max=1000, request_text_bytes_max=500)
    memory.ids.write_bytes(bytes(IDS_OFFSET + 600))
    async with serving(pipeline_over(engine, executor, memory, limits)) as live:
        await register(live, memory)
        twice = [Input("user.ids", "INT64", [], [75]), Input("tag.ids", "INT64", [], [75])]
        for inputs, expected_error in (
            (twice, "^inputs has 1200 bytes in shared memory, the limit is 1000"),
            (
                [Input("user.ids", "BYTES", [], [1])],
                "^inputs has 600 bytes of strings in shared memory, the limit is 500",
            ),
        ):
            infer_request = in_regions(inputs, dict.fromkeys(range(len(inputs)), (0, 600)))
            with pytest.raises(RejectedRequestError, match=expected_error) as caught:
                await as_raw(live, infer_request)
            assert caught.value.status == "RESOURCE_EXHAUSTED"
