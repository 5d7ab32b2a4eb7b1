"""Shards in this process that serve a router from the stored rows of their parts."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TypeVar, cast

import numpy as np

from embedserve.call_trace import CallTrace
from embedserve.engine.programs import Programs
from embedserve.errors import EmbedServeError
from embedserve.fanout.local_part import LocalParts
from embedserve.fanout.part_messages import VALUE_DTYPES
from embedserve.fanout.parted_version import ExpectedPart
from embedserve.fanout.router_engine import RouterEngine
from embedserve.fanout.shards import Shards
from embedserve.fanout.values_budget import ValuesBudget
from embedserve.lookup_types import Batch
from embedserve.on_missing import MissingPolicy
from embedserve.shard_client.reply import OK, Reply
from embedserve_proto import embedding_pb2
from embedserve_store import ModelStore, ModelVersion
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.goldens.reference_pooling import pool_stored
from embedserve_store.parts.part import NO_ROWS, LocalTables, Part

T = TypeVar("T")
FAIL_ALL = MissingPolicy()


class LocalShards:
    """Serves lookups of the parts of model "m" on the router's event loop.

    Attributes:
        store: folder of the model's store.
        replies: replies of parts that return no values, by part.
        changes: functions that change the response of a part, by part.
        called_parts: numbers of the called parts, in order.
        dtypes: dtype of the values of each response, in order.
        traced: call records of the last batch, by part.
    """

    traces_calls = True

    def __init__(self, store: Path) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.budget = ValuesBudget()
        self.replies: dict[int, Reply] = {}
        self.changes: dict[int, Callable[[embedding_pb2.EmbedResponse], None]] = {}
        self.called_parts: list[int] = []
        self.dtypes: list[str] = []
        self.traced: dict[int, CallTrace | None] = {}
        self.store = store
        hosts = ModelStore(store).load("m").plan.hosts
        assert hosts is not None
        parts = [Part(part, hosts.parts) for part in range(hosts.parts)]
        self.versions = [ModelStore(store, selection=part).load("m") for part in parts]

    def call_part(
        self,
        expected: ExpectedPart,
        message: Sequence[bytes],
        deadline_s: float,
        on_done: Callable[[Reply], None],
        calls: CallTrace | None,
    ) -> None:
        self.called_parts.append(expected.part)
        self.traced[expected.part] = calls
        reply = self.replies.get(expected.part) or self._answer(expected, b"".join(message))
        assert self.loop is not None
        self.loop.call_soon(on_done, reply)

    def _answer(self, expected: ExpectedPart, message: bytes) -> Reply:
        request = embedding_pb2.EmbedRequest.FromString(message)
        version = self.versions[expected.part]
        assert version.whole.fingerprint == expected.fingerprint
        assert request.model == str(expected.key)
        ids = np.frombuffer(request.ids_bytes, np.int64)
        lengths = np.frombuffer(request.lengths_bytes, np.int32)
        weights = (
            np.frombuffer(request.weights_bytes, np.float32) if request.weights_bytes else None
        )
        bags = _in_order(version, list(request.keys), ids, lengths, weights)
        values = pool_stored(version.manifest, bags, bags.ids, version.tables)
        if request.output_keys:
            values = _selected(version, bags, values, set(request.output_keys))
        dtype = VALUE_DTYPES[embedding_pb2.OutputDType.Name(request.output_dtype).lower()]
        response = embedding_pb2.EmbedResponse(
            model=expected.key.model,
            version=expected.key.version,
            values=values.astype(dtype).tobytes(),
            output_dtype=request.output_dtype,
        )
        self.dtypes.append(dtype.name)
        if expected.part in self.changes:
            self.changes[expected.part](response)
        return Reply(OK, payload=response.SerializeToString())


def _selected(version: ModelVersion, bags: Bags, values: np.ndarray, keys: set[str]) -> np.ndarray:
    """Returns the values of ``keys``, in the order of the version."""
    columns = version.manifest.columns
    assert keys < {one.key for one in columns}
    if version.manifest.is_pooled:
        chosen = [values[:, one.start : one.end] for one in columns if one.key in keys]
        return np.concatenate(chosen, axis=1)
    ends = np.cumsum([bags.lengths[one.feature].sum() for one in columns])
    blocks = np.split(values, ends[:-1])
    return np.concatenate(
        [block for block, one in zip(blocks, columns, strict=True) if one.key in keys]
    )


def _in_order(
    version: ModelVersion,
    keys: list[str],
    ids: np.ndarray,
    lengths: np.ndarray,
    weights: np.ndarray | None,
) -> Bags:
    """Returns a request in the order of the version's features."""
    bags = lengths.reshape(len(keys), -1)
    missing = [feature for feature in version.manifest.features if feature not in keys]
    bags = np.concatenate([bags, np.zeros((len(missing), bags.shape[1]), bags.dtype)])
    keys = keys + missing
    order = [keys.index(feature) for feature in version.manifest.features]
    assert len(order) == len(keys)
    ends = np.append(0, bags.sum(axis=1).cumsum())
    spans = [slice(ends[i], ends[i + 1]) for i in order]
    sorted_ids = np.concatenate([ids[span] for span in spans])
    sorted_weights = None if weights is None else np.concatenate([weights[span] for span in spans])
    return Bags(sorted_ids, bags[order], sorted_weights)


@contextmanager
def routed(
    shards: LocalShards,
    partial_dtype: str = "float32",
    on_missing: MissingPolicy = FAIL_ALL,
    local: LocalTables = NO_ROWS,
    inline_bytes_max: int = 1 << 20,
    programs: Programs | None = None,
    row_cache_bytes: int = 0,
) -> Iterator[RouterEngine]:
    """Yields a router's engine, whose event loop runs in a thread.

    Its local part is compiled only if its layout is not in ``programs``.
    """
    loop = shards.loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        version = ModelStore(shards.store, selection=local).load("m")
        parts = LocalParts(inline_bytes_max)
        parts._programs = programs
        yield RouterEngine(
            version,
            cast(Shards, shards),
            partial_dtype,
            on_missing,
            parts.open(version),
            inline_bytes_max,
            row_cache_bytes,
        )
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def batch_of(
    engine: RouterEngine,
    ids: np.ndarray,
    lengths: np.ndarray,
    weights: np.ndarray | None = None,
    sizes: Sequence[int] = (),
    calls: CallTrace | None = None,
) -> tuple[Batch, np.ndarray]:
    """Returns a batch of ``ids`` after its lookup, and its values; raises the error that fails all
    of it.

    Without ``sizes`` the batch has one request.
    """
    examples = lengths.size // len(engine.manifest.features)
    batch = Batch(ids, lengths, weights, list(sizes) or [examples], examples, calls=calls)
    ends: list[np.ndarray | EmbedServeError] = []
    loop = engine._shards.loop
    assert loop is not None
    is_done = threading.Event()

    def end(values: np.ndarray | EmbedServeError) -> None:
        ends.append(values)
        is_done.set()

    loop.call_soon_threadsafe(engine.begin, batch, perf_counter() + 60, end)
    assert is_done.wait(60)
    (values,) = ends
    if isinstance(values, EmbedServeError):
        raise values
    return batch, values


def on_loop(shards: LocalShards, function: Callable[[], T]) -> T:
    """Returns the result of ``function``, which the router's event loop calls."""

    async def call() -> T:
        return function()

    assert shards.loop is not None
    return asyncio.run_coroutine_threadsafe(call(), shards.loop).result(60)
