"""Tests of our clients with shared memory against a whole server: results equal those without."""

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server.fake_engine import FakeEngine
from server.fake_models import model_info, ruled_info, unpooled_info
from server.live import Live, make_pipeline, serving
from server.waiting import until

from embedserve.config import Limits
from embedserve.shared_memory.region_registry import EVERYBODY, RegionRegistry
from embedserve_client import (
    AsyncEmbedClient,
    AsyncGrpcEmbedClient,
    EmbedClient,
    EmbedResult,
    GrpcEmbedClient,
    InvalidRequest,
    TooLarge,
    UnknownModel,
)
from embedserve_client.rest.calls import Call
from embedserve_proto import open_inference_pb2 as pb

PREFIX = f"/embedserve-test-{os.getpid()}-"
INFER = "/v2/models/wide/infer"
REGISTER = "register"
EMBED = "/embed"
FEATURES = {"user": (7, 1024), "tag": (5, 1024)}
"""Features whose vectors have 8 KiB per example."""
WIDE = model_info("wide", FEATURES)
EXAMPLES = 70


KINDS = {
    "rest": EmbedClient,
    "rest-async": AsyncEmbedClient,
    "grpc": GrpcEmbedClient,
    "grpc-async": AsyncGrpcEmbedClient,
}
ASYNC = ("rest-async", "grpc-async")


def path_of(call: Any) -> str:
    """Returns the path of a call as in REST, without the name of a region."""
    if isinstance(call, Call):
        return REGISTER if call.path.endswith(f"/{REGISTER}") else call.path
    if isinstance(call.request, pb.ModelInferRequest):
        return f"/v2/models/{call.request.model_name}/infer"
    is_register = isinstance(call.request, pb.SystemSharedMemoryRegisterRequest)
    return REGISTER if is_register else EMBED


class Client:
    """Any client behind one interface, and the paths that it requested."""

    def __init__(self, live: Live, kind: str = "rest-async", **options: Any) -> None:
        address = live.grpc_target if kind.startswith("grpc") else f"127.0.0.1:{live.http_port}"
        self._client: Any = KINDS[kind](address, **options)
        self._is_async = kind in ASYNC
        self.paths: list[str] = []
        send = self._client._send

        def record_and_send(call: Any) -> Any:
            self.paths.append(path_of(call))
            return send(call)

        self._client._send = record_and_send

    async def embed(self, features: Any, **options: Any) -> EmbedResult:
        if self._is_async:
            result: EmbedResult = await self._client.embed(features, **options)
            return result
        # The thread appends to a list, because its return value would keep the result, and so its
        # region, for a moment longer.
        results: list[EmbedResult] = []
        await asyncio.to_thread(lambda: results.append(self._client.embed(features, **options)))
        return results.pop()

    async def close(self) -> None:
        if self._is_async:
            await self._client.close()
        else:
            self._client.close()


def files() -> list[Path]:
    return list(Path("/dev/shm").glob(f"{PREFIX[1:]}*"))


@pytest.fixture
def wide() -> FakeEngine:
    return FakeEngine(WIDE)


@pytest.fixture
async def live(wide: FakeEngine, executor: ThreadPoolExecutor) -> AsyncIterator[Live]:
    others = FakeEngine(ruled_info()), FakeEngine(unpooled_info())
    shared = RegionRegistry(PREFIX, Limits())
    pipeline = make_pipeline(wide, *others, executor=executor, shared_memory=shared)
    async with serving(pipeline) as live:
        yield live
    assert files() == []


@pytest.fixture(params=KINDS)
async def client(live: Live, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    client = Client(live, request.param, shared_memory=PREFIX)
    yield client
    await client.close()
    assert files() == []
    assert not live.pipeline.shared_memory or not live.pipeline.shared_memory.status(EVERYBODY)


@cache
def bags(seed: int, examples: int = EXAMPLES) -> dict[str, list[list[int]]]:
    random = np.random.default_rng(seed)
    return {
        feature: [random.integers(0, rows, random.integers(0, 4)).tolist() for _ in range(examples)]
        for feature, (rows, _) in FEATURES.items()
    }


@cache
def expected(seed: int, examples: int = EXAMPLES) -> np.ndarray:
    """Returns the vectors of ``bags``."""
    return FakeEngine(WIDE).expected(bags(seed, examples))


async def test_vectors_equal_those_of_the_model(client: Client) -> None:
    for number in range(4):
        result = await client.embed(bags(number))
        assert np.array_equal(result.values, expected(number))
        assert (result.model, result.version) == ("wide", WIDE.version)
        assert (result.keys, result.length_per_key) == (("user", "tag"), (1024, 1024))
        assert np.array_equal(result["tag"], expected(number)[:, 1024:])
        del result  # its region is free again
    assert client.paths == [REGISTER, EMBED, INFER, INFER, INFER]
    assert len(files()) == 1


def weighted(of_bags: dict[str, list[list[int]]]) -> dict[str, list[list[float]]]:
    return {"tag": [[0.5 + one for one in bag] for bag in of_bags["tag"]]}


REQUESTED_BAGS = bags(3, 2 * EXAMPLES)
OPTIONS: list[dict[str, Any]] = [
    {"model": "wide"},
    {"model": "wide@7"},
    {"output_dtype": "float16"},
    {"routing_key": "user 7"},
    {"weights": weighted(REQUESTED_BAGS)},
    {"model": "ruled", "features": {"user": [[-1, 5], [7]] * 6000}},  # with unknown ids
]


@pytest.mark.parametrize("options", OPTIONS)
async def test_every_option_works(live: Live, client: Client, options: dict[str, Any]) -> None:
    options = {"features": REQUESTED_BAGS} | options
    plain = Client(live)
    wanted = await plain.embed(**options)
    assert bool(wanted.unknown_ids) == (wanted.model == "ruled")
    for _ in range(3):  # the second may find no file that is large enough
        result = await client.embed(**options)
        assert result.values.dtype == wanted.values.dtype
        assert np.array_equal(result.values, wanted.values)
        assert (result.model, result.version) == (wanted.model, wanted.version)
        assert (result.keys, result.unknown_ids) == (wanted.keys, wanted.unknown_ids)
        del result  # its region is free again
    assert client.paths[-1] == f"/v2/models/{options.get('model', 'wide')}/infer"
    await plain.close()


async def test_request_with_missing_feature_and_arrays_uses_shared_memory(
    client: Client, wide: FakeEngine
) -> None:
    tags = np.arange(EXAMPLES) % 5
    for _ in range(2):
        result = await client.embed({"tag": tags})
    tag_vectors = wide.expected({"tag": [[one] for one in tags.tolist()]})
    assert np.array_equal(result.values, tag_vectors)
    assert client.paths[-1] == INFER


async def test_results_stay_valid_during_later_requests(client: Client) -> None:
    held = [await client.embed(bags(number)) for number in range(20)]
    for number, result in enumerate(held):
        assert np.array_equal(result.values, expected(number))
    assert client.paths.count(INFER) > 2


async def test_many_concurrent_requests(client: Client) -> None:
    await client.embed(bags(0))
    for _ in range(3):
        results = await asyncio.gather(*(client.embed(bags(number)) for number in range(8)))
        for number, result in enumerate(results):
            assert np.array_equal(result.values, expected(number))
        del results, result
    assert client.paths.count(INFER) >= 4
    assert len(files()) <= 8


async def test_larger_request_gets_a_larger_file(client: Client) -> None:
    for examples in (EXAMPLES, EXAMPLES, 5 * EXAMPLES, 5 * EXAMPLES, 5 * EXAMPLES):
        result = await client.embed(bags(1, examples))
        assert np.array_equal(result.values, expected(1, examples))
        del result
    assert client.paths == [REGISTER, EMBED, INFER, REGISTER, EMBED, INFER, INFER]
    assert [one.stat().st_size for one in files()] == [4 << 20]


async def test_regions_are_registered_again_after_a_restart(live: Live, client: Client) -> None:
    await client.embed(bags(0))
    await client.embed(bags(0))
    shared = live.pipeline.shared_memory
    assert shared is not None
    shared.unregister(EVERYBODY)
    client.paths.clear()
    for number in range(3):
        result = await client.embed(bags(number))
        assert np.array_equal(result.values, expected(number))
        del result
    assert client.paths == [INFER, EMBED, REGISTER, EMBED, INFER]


async def test_errors_equal_those_of_embed(live: Live, client: Client) -> None:
    wrong = {"user": [[1]] * EXAMPLES, "tag": [[1]] * (EXAMPLES - 1) + [[5]]}
    await client.embed(bags(0))
    with pytest.raises(InvalidRequest, match="69") as caught:
        await client.embed(wrong)
    assert caught.value.field == "features.tag[69][0]"
    assert client.paths[-2:] == [INFER, EMBED]
    with pytest.raises(UnknownModel, match="'films'"):
        await client.embed(bags(0), model="films")
    with pytest.raises(InvalidRequest, match="output_dtype: 'float8' is not"):
        await client.embed(bags(0), output_dtype="float8")
    with pytest.raises(TooLarge, match="the limit is"):
        await client.embed({"user": np.zeros(Limits().request_examples_max + 1, np.int64)})


async def test_small_and_string_requests_bypass_shared_memory(live: Live, client: Client) -> None:
    plain = Client(live)
    strings = {"tag": [["drama"], ["映画", "nothing"]] * 3000}
    for options in (
        {"features": {"user": [[1]]}},
        {"features": bags(0), "output_keys": ["tag"]},
        {"features": strings, "model": "ruled"},
    ):
        for _ in range(2):
            result, wanted = await client.embed(**options), await plain.embed(**options)
            assert np.array_equal(result.values, wanted.values)
            assert (result.keys, result.unknown_ids) == (wanted.keys, wanted.unknown_ids)
    assert set(client.paths) == {REGISTER, EMBED}
    await plain.close()


async def test_unpooled_rows_are_returned(live: Live, client: Client) -> None:
    plain = Client(live)
    items = {"item": [[1, 2], [5, 99], []] * 5000, "last": [[3], [], [4]] * 5000}
    wanted = await plain.embed(items, model="sequence")
    for _ in range(3):  # the second may find no file that is large enough
        result = await client.embed(items, model="sequence")
        assert result.unknown_ids == wanted.unknown_ids != {}
        assert (result.keys, len(result.values)) == (wanted.keys, len(wanted.values))
        for key in wanted.keys:
            assert np.array_equal(result[key].values, wanted[key].values)
            assert np.array_equal(result[key].lengths, wanted[key].lengths)
    assert client.paths[-1] == "/v2/models/sequence/infer"
    await plain.close()


@pytest.mark.parametrize("kind", ASYNC)
async def test_versions_of_a_model_are_served(executor: ThreadPoolExecutor, kind: str) -> None:
    """Checks versions of different widths; the result of each has the keys of its version."""
    engines = []
    for alias, number, features in (
        ("stable", 7, FEATURES),
        ("canary", 8, {"user": (7, 512), "tag": (5, 2048), "day": (3, 64)}),
    ):
        info = model_info("wide", features)
        manifest = replace(info.manifest, version=number)
        named = replace(info, manifest=manifest, served_name=f"wide@{alias}")
        engines.append(FakeEngine(named, seed=number))
    shared = RegionRegistry(PREFIX, Limits())
    pipeline = make_pipeline(*engines, executor=executor, shared_memory=shared)
    async with serving(pipeline) as live:
        client = Client(live, kind, shared_memory=PREFIX)
        for alias, engine in (("stable", 0), ("canary", 1)) * 3:
            result = await client.embed(bags(5), model=f"wide@{alias}")
            assert result.version == engines[engine].model.version
            assert result.keys == engines[engine].model.keys
            assert np.array_equal(result.values, engines[engine].expected(bags(5)))
            del result
        assert client.paths.count("/v2/models/wide@canary/infer") >= 2
        await client.close()


@pytest.mark.parametrize("kind", ASYNC)
async def test_cancelled_call_discards_its_region(
    executor: ThreadPoolExecutor, wide: FakeEngine, kind: str
) -> None:
    """Checks that the region is discarded, because the server may still write to it."""
    shared, limits = RegionRegistry(PREFIX, Limits()), Limits(inline_bytes_max=0)
    pipeline = make_pipeline(wide, executor=executor, limits=limits, shared_memory=shared)
    async with serving(pipeline) as live:
        client = Client(live, kind, shared_memory=PREFIX)
        await client.embed(bags(0))
        wide.hold()
        call = asyncio.create_task(client.embed(bags(1)))
        await until(lambda: len(wide.lookups) == 2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert files() == []
        wide.release()
        for number in (2, 3):
            result = await client.embed(bags(number))
            assert np.array_equal(result.values, expected(number))
        assert client.paths == [REGISTER, EMBED, INFER, REGISTER, EMBED, INFER]
        await client.close()


@pytest.mark.parametrize("kind", ASYNC)
@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        ("", "the server has no shared memory: it is started with --shared-memory"),
        ("/another-", "it does not begin with '/another-' \\(--shared-memory\\)"),
    ],
)
async def test_missing_or_other_server_prefix_is_an_error(
    executor: ThreadPoolExecutor, wide: FakeEngine, prefix: str, reason: str, kind: str
) -> None:
    shared = RegionRegistry(prefix, Limits()) if prefix else None
    pipeline = make_pipeline(wide, executor=executor, shared_memory=shared)
    message = f"^shared_memory is '{PREFIX}': .*{reason}"
    async with serving(pipeline) as live:
        client = Client(live, kind, shared_memory=PREFIX)
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=message):
                await client.embed({"user": [[1]]})
        assert files() == []
        await client.close()


@pytest.mark.parametrize("kind", ASYNC)
async def test_full_region_registry_falls_back_to_plain_requests(
    executor: ThreadPoolExecutor, wide: FakeEngine, kind: str
) -> None:
    limits = Limits(shared_memory_bytes_max=(1 << 20) + 1)
    shared = RegionRegistry(PREFIX, limits)
    pipeline = make_pipeline(wide, executor=executor, limits=limits, shared_memory=shared)
    async with serving(pipeline) as live:
        client = Client(live, kind, shared_memory=PREFIX)
        held = [await client.embed(bags(number)) for number in range(6)]
        for number, result in enumerate(held):
            assert np.array_equal(result.values, expected(number))
        assert client.paths.count(INFER) == 1
        await client.close()
