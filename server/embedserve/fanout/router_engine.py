"""The engine of a router: looks batches up in the shards that hold the parts of a version.

It takes and returns what engine/engine.py does. A batch is divided by rows, one call goes to each
part that has rows of it, all at once, and their sums are added. Calls begin and end on the event
loop; only ``lookup``, for goldens, waits for it in another thread. Small tables are looked up in
this process (local_part.py), as one more part.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from time import monotonic, perf_counter, sleep
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from embedserve.batching.lookup_engine import RemoteLookups
from embedserve.deltas.rows_reader import RowsReader
from embedserve.engine.pooled_values import divide_means, to_float16
from embedserve.errors import (
    DeadlineExceededError,
    EmbedServeError,
    EngineError,
    MissingPartError,
    NotReadyError,
    OverloadedError,
    RequestTooLargeError,
)
from embedserve.fanout.batch_fanout import BatchFanout, Finish
from embedserve.fanout.local_part import LocalPart
from embedserve.fanout.part_messages import PartMessages, WrongAnswerError
from embedserve.fanout.partition import Partition, PartLookup
from embedserve.fanout.pooled_batch import PooledBatch, PooledColumns
from embedserve.fanout.unpooled_batch import UnpooledBatch
from embedserve.fanout.values_budget import BATCHES_MAX
from embedserve.lookup_types import Batch
from embedserve.metrics.rate_limited_logger import RateLimitedLogger
from embedserve.on_missing import MissingPolicy
from embedserve.shard_client.reply import (
    DEADLINE_EXCEEDED,
    OK,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    Reply,
)
from embedserve_store.errors import UnopenedError
from embedserve_store.goldens.goldens_file import Bags, Goldens
from embedserve_store.goldens.parity import check_published
from embedserve_store.goldens.reference_pooling import row_numbers
from embedserve_store.model_version import ModelVersion
from embedserve_store.parts.local_tables import with_local_part
from embedserve_store.parts.part import Part

if TYPE_CHECKING:
    from embedserve.fanout.shards import Shards

logger = logging.getLogger(__name__)

INLINE_SHARE = 16
"""A router's work on a byte of ids or results, in bytes of a lookup in an engine."""
ID_BYTES = 24
"""Bytes of an id as it is received, divided over the parts and sent."""
GOLDENS_S_MAX = 30.0
"""Seconds for one lookup of the goldens of a version, before it serves."""
LOOP_POLL_S = 0.5
"""Seconds between two looks whether the event loop that carries a lookup has ended."""
GOLDENS_PAUSE_S, GOLDENS_RETRY_S_MAX = 1.0, 10.0
"""Seconds between two lookups of goldens that are not answered, and until the last one begins."""

FAIL_ALL = MissingPolicy()
"""Policy without zeros: a part without a replica fails the requests for its rows."""


class ServedPart(NamedTuple):
    """A part of a version, as a shard has to serve it to be asked."""

    model: str
    version: int
    fingerprint: str
    part: int
    parts: int


def served_parts(version: ModelVersion) -> list[ServedPart]:
    """Returns what the shards of each part of ``version`` have to serve."""
    manifest, hosts = version.whole, version.plan.hosts
    assert hosts is not None
    return [
        ServedPart(manifest.model, manifest.version, manifest.fingerprint, part, hosts.parts)
        for part in range(hosts.parts)
    ]


class RouterEngine:
    """One version of a model whose rows are in shards.

    Attributes:
        manifest, translator, plan: as those of Engine. Ids become row numbers in the router.
        fingerprint, part, spare_rows: as those of Engine that serves a whole version.
        parts: what the shards of each part have to serve.
        local_tables: names of the tables that are looked up in this process.
        traces_calls: whether calls of shards are recorded for traces.
        rows: None, as rows never change.
    """

    waits_for_device = False
    replicas = 1
    device_type = "cpu"
    replanned = False
    lookup_kind = "parts"
    batches_max = BATCHES_MAX

    def __init__(
        self,
        version: ModelVersion,
        shards: Shards,
        partial_dtype: str = "float32",
        on_missing: MissingPolicy = FAIL_ALL,
        local: LocalPart | None = None,
        inline_bytes_max: int = 0,
    ) -> None:
        """
        Args:
            version: version as a router opens it; its plan has a host plan.
            shards: caller of its parts.
            partial_dtype: dtype in which shards send their values for batches, one of
                part_messages.DTYPES. Those for ``lookup``, and so for the goldens, are float32.
            on_missing: tables whose rows batches may lack. Values of ``lookup``, and so of the
                goldens, lack none.
            local: the tables of ``version`` that are looked up in this process; None for none.
            inline_bytes_max: bytes read and written by the largest lookup of an engine that runs
                on the event loop. Batches of a router cost INLINE_SHARE times as much.
        """
        manifest, hosts = version.manifest, version.plan.hosts
        assert hosts is not None  # a store opened for a router has checked it
        self.manifest = manifest
        self.translator = version.translator
        self.plan = version.plan
        self.rows: RowsReader | None = None
        self.traces_calls = shards.traces_calls
        self._version = version
        self._shards = shards
        self._local = local
        self.local_tables = () if local is None else local.tables
        if local is not None:
            hosts = with_local_part(hosts, local.tables)
        self._partition = Partition(manifest, hosts)
        self._columns = PooledColumns(self._partition) if manifest.is_pooled else None
        # Bytes of the result for an example of a pooled model, and for an id of another.
        self._example_bytes = 4 * sum(manifest.length_per_key) if manifest.is_pooled else 0
        keys = Counter(one.feature for one in manifest.columns)
        most_keys = 0 if manifest.is_pooled else max(keys.values())
        self._row_bytes = 4 * manifest.length_per_key[0] * most_keys
        self._work_bytes_max = inline_bytes_max // INLINE_SHARE
        self._means = [one for one in manifest.columns if one.table.pooling == "mean"]
        self.parts = served_parts(version)
        self._exact = self._messages_of("float32")
        self._messages = self._messages_of(partial_dtype)
        fails = {one.feature for one in manifest.columns if on_missing.fails(one.table.name)}
        features = range(len(manifest.features))
        self._required = np.array([feature in fails for feature in features])
        self._all_required = np.ones_like(self._required)
        self.fingerprint = manifest.fingerprint
        self.part: Part | None = None
        self.spare_rows = None
        self._log = RateLimitedLogger(logger)

    @property
    def remote(self) -> RemoteLookups:
        """Returns the engine itself; see batching.lookup_engine.RemoteLookups. An attribute would
        be a reference cycle, which keeps the version open."""
        return self

    def _messages_of(self, dtype: str) -> list[PartMessages]:
        partition = self._partition
        return [
            PartMessages(
                part, partition.sent_features(number), dtype, has_more=self._has_local(number)
            )
            for number, part in enumerate(partition.parts[: len(self.parts)])
        ]

    def _has_local(self, part: int) -> bool:
        """Returns whether the shards of ``part`` have a table that is looked up in this process."""
        hosts = self.plan.hosts
        return hosts is not None and any(hosts.rows_on(name, part) for name in self.local_tables)

    def begin(self, batch: Batch, deadline_s: float, finish: Finish) -> None:
        """Begins the lookup of ``batch``; see batching.lookup_engine.RemoteLookups."""
        self._begin(batch, deadline_s, finish, self._messages, self._required)

    def _begin(
        self,
        batch: Batch,
        deadline_s: float,
        finish: Finish,
        messages: Sequence[PartMessages],
        required: np.ndarray,
    ) -> None:
        """Begins the lookup of ``batch`` once there is room for the values of its parts."""
        until_s = monotonic() + deadline_s - perf_counter()
        nbytes, budget = self._values_bytes(batch), self._shards.budget

        def end(values: np.ndarray | EmbedServeError) -> None:
            try:
                finish(values)
            finally:
                budget.end(nbytes)

        fanout = BatchFanout(self, batch, messages, required, until_s, end)
        expire = partial(
            finish, DeadlineExceededError("the deadline passed while its batch waited for others")
        )
        budget.begin(nbytes, fanout.begin, until_s, expire)

    def _values_bytes(self, batch: Batch) -> int:
        """Returns the bytes of float32 values that the parts of a batch return, at most."""
        if self._columns is None:
            return self._row_bytes * batch.ids.size
        widest, all_parts = self._columns.part_width_max, self._columns.part_widths_sum
        by_ids = batch.ids.size * widest  # a bag on a part has an id
        return 4 * min(by_ids, batch.batch_size * all_parts)

    def is_large(self, batch: Batch) -> bool:
        """Returns whether threads divide ``batch`` and add its values, not the event loop."""
        per_id = ID_BYTES + self._row_bytes
        work_bytes = per_id * batch.ids.size + self._example_bytes * batch.batch_size
        return work_bytes > self._work_bytes_max

    def divide(self, batch: Batch) -> PooledBatch | UnpooledBatch:
        """Divides the ids of ``batch`` over the parts."""
        if self._columns is None:
            return UnpooledBatch(self._partition, batch.ids, batch.lengths, batch.skipped)
        divided = self._partition.divide(batch.ids, batch.lengths, batch.weights)
        return PooledBatch(self._partition, self._columns, divided)

    def look_up(
        self, lookups: Sequence[PartLookup], fanout: BatchFanout, until_s: float, batch: Batch
    ) -> None:
        """Begins ``lookups``, at least one, whose replies ``fanout`` takes."""
        last = lookups[-1]
        local = self._local if last.part == len(self.parts) else None
        for i, lookup in enumerate(lookups[:-1] if local else lookups):
            message = fanout.messages[lookup.part].encode(lookup)
            on_reply = partial(fanout.on_reply, i)
            served = self.parts[lookup.part]
            self._shards.look_up(served, message, until_s, on_reply, batch.calls)
        if local:
            local.look_up(last, partial(fanout.take, len(lookups) - 1))

    def read_reply(
        self, lookup: PartLookup, messages: PartMessages, reply: Reply
    ) -> np.ndarray | EmbedServeError:
        """Returns the values of ``reply`` to ``lookup``, or the error for the callers: a
        MissingPartError if no replica is there."""
        served = self.parts[lookup.part]
        who = f"part {served.part} of {served.parts} of {served.model!r} version {served.version}"
        if reply.status == OK:
            try:
                return messages.decode(reply.payload, lookup.shape)
            except WrongAnswerError as error:
                reply = Reply(-1, str(error))
        self._log.log(logging.ERROR, f"{who} fails", f"status {reply.status}: {reply.message}")
        if reply.status == UNAVAILABLE:
            kind = MissingPartError if reply.is_lost else NotReadyError
            return kind(f"{who} is not available")
        if reply.is_too_large:
            return RequestTooLargeError(
                f"{who} rejects a request of this size: {reply.message}. Send fewer examples or "
                "ids, or raise this limit of the shards"
            )
        if reply.status == RESOURCE_EXHAUSTED:
            overloaded = OverloadedError(f"{who} is overloaded")
            overloaded.retry_after_s = max(reply.retry_after_s, overloaded.retry_after_s)
            return overloaded
        if reply.status == DEADLINE_EXCEEDED:
            return DeadlineExceededError(f"{who} has not answered in time")
        return EngineError(f"the lookup in {who} failed; the server's log says why")

    def log_failure(self, batch: Batch) -> None:
        """Logs the unexpected error that is being handled, with a rate limit."""
        kind = f"a lookup in the parts of {self.manifest.model!r} fails"
        self._log.log(logging.ERROR, kind, f"{batch.ids.size} ids", with_traceback=True)

    def finish_values(self, values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Divides the sums of tables with mean pooling by the numbers of ids, in place."""
        if self._means:
            divide_means(values, lengths, self._means)
        return values

    def lookup(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
        as_float16: bool = False,
    ) -> np.ndarray:
        """Returns the rows of ``ids`` as Engine.lookup does. Waits for the shards, so it is called
        in another thread than the event loop's.

        Raises:
            EmbedServeError: a part has not answered, or the event loop has ended.
            TimeoutError: the event loop was busy.
        """
        examples = lengths.size // len(self.manifest.features)
        batch = Batch(ids, lengths, weights, [examples], examples)
        answer: Future[np.ndarray] = Future()

        def end(values: np.ndarray | EmbedServeError) -> None:
            error = batch.failures[0][1] if batch.failures else values
            if isinstance(error, EmbedServeError):
                answer.set_exception(error)
            elif isinstance(values, np.ndarray):
                answer.set_result(values)

        def begin() -> None:
            try:
                deadline_s = perf_counter() + GOLDENS_S_MAX
                self._begin(batch, deadline_s, end, self._exact, self._all_required)
            except Exception as error:
                answer.set_exception(error)

        loop = self._shards.loop
        assert loop is not None
        loop.call_soon_threadsafe(begin)
        values = _result(answer, loop)
        return self.to_float16(values) if as_float16 else values

    def to_float16(self, values: np.ndarray) -> np.ndarray:
        """Returns ``values`` rounded to float16; see pooled_values.to_float16."""
        return to_float16(values)

    def goldens(self) -> Goldens:
        """Returns the goldens of the version. Raises StoreError if the file has changed since it
        was published."""
        return self._version.goldens()

    def warm_up(self) -> None:
        """Looks the version's goldens up in the shards and compares the results, in another thread
        than the event loop's. Lookups that are not answered are repeated for some seconds.

        Raises:
            UnopenedError: a part has not answered. The version may be as published.
            StoreError: a result differs from the published result.
        """
        goldens, where = self.goldens(), str(self._version.path)
        until_s = monotonic() + GOLDENS_RETRY_S_MAX
        while True:
            try:
                answers = self._look_up_bags(goldens.bags)
                break
            except (EmbedServeError, TimeoutError) as error:
                if isinstance(error, RequestTooLargeError) or monotonic() >= until_s:
                    why = str(error) or "the event loop was busy"
                    raise UnopenedError(f"{where}: its goldens were not answered: {why}") from error
            sleep(GOLDENS_PAUSE_S)
        check_published(answers, goldens, self.manifest, where)

    def _look_up_bags(self, bags: Bags) -> np.ndarray:
        numbers = row_numbers(bags, self.translator)
        return self.lookup(numbers, bags.lengths.reshape(-1), bags.weights)

    def check(self) -> None:
        """Raises StoreError if the rows in this process have changed. The shards check theirs."""
        if self._local is not None:
            self._local.check()


def _result(answer: Future[np.ndarray], loop: asyncio.AbstractEventLoop) -> np.ndarray:
    """Waits for the result of a lookup on ``loop``. At the end of a server the loop may end before
    the lookup does; a thread that went on waiting would delay the end of the process."""
    until_s = monotonic() + 2 * GOLDENS_S_MAX
    while True:
        try:
            return answer.result(LOOP_POLL_S)
        except TimeoutError:
            if answer.done():
                return answer.result()
            if monotonic() >= until_s:
                raise
            if not loop.is_running():
                raise EngineError("the event loop has ended") from None
