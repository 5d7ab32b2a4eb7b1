"""Requests with tensors in shared memory, and the results that they read back."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server.fake_engine import FakeEngine
from server.fake_models import ruled_info, unpooled_info
from server.live import Live, make_pipeline, serving
from server.open_inference import InferRequest, InferResponse, Input, Place, jagged
from server.wire.inference_requests import COLUMNS

from embedserve.config import Limits
from embedserve.pipeline import RequestPipeline
from embedserve.shared_memory.region_registry import RegionRegistry

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


def in_regions(
    inputs: Sequence[Input],
    ins: Mapping[int, tuple[int, int]],
    outs: Mapping[str, tuple[int, int] | None] | None = None,
    ids: str = "ids",
    vectors: str = "vectors",
) -> InferRequest:
    """Returns a request with tensors in regions, at (offset, bytes).

    Args:
        ins: location of each input that is in shared memory, by position.
        outs: location of each output, by name; None: the output is in the response.
    """
    outs = outs or {}
    return InferRequest(
        inputs,
        list(outs),
        ins={at: Place(ids, *place) for at, place in ins.items()},
        outs={name: Place(vectors, *place) for name, place in outs.items() if place is not None},
    )


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
    memory: Memory, infer_request: InferRequest, response: InferResponse, expected: np.ndarray
) -> None:
    """Checks the values in shared memory, and their location in the response."""
    assert {*response.outputs, *response.shared} == set(infer_request.outputs)
    assert response.shared.keys() == infer_request.outs.keys()
    for name in infer_request.outputs:
        wanted = expected[:, COLUMNS.get(name, slice(None))]
        if name in response.outputs:
            assert np.array_equal(response.outputs[name], wanted)
            continue
        _, shape, place = response.shared[name]
        requested = infer_request.outs[name]
        assert shape == list(wanted.shape)
        assert place == {
            "shared_memory_region": requested.region,
            "shared_memory_offset": requested.offset,
            "shared_memory_byte_size": wanted.nbytes,
        }
        read = memory.values((requested.offset, wanted.nbytes), expected.dtype)
        assert np.array_equal(read.reshape(wanted.shape), wanted)


INPUTS = jagged({"user": [[1, 2], []]})
INS = {0: (0, 16), 1: (16, 8)}
USER: dict[str, tuple[int, int] | None] = {"user": (0, 32)}
