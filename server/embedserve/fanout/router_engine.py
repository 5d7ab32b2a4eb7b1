"""The engine of a router: looks batches up in the shards that hold the parts of a version.

It takes and returns what engine/engine.py does. A batch is divided by rows, one call goes to each
part that has rows of it, all at once, and their sums are added. Calls begin and end on the event
loop; only ``lookup``, for goldens, waits for it in another thread. Small tables are looked up in
this process (local_part.py), as one more part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from time import monotonic, perf_counter, sleep
from typing import TYPE_CHECKING

import numpy as np

from embedserve.batching.lookup_engine import RemoteLookups
from embedserve.deltas.rows_reader import RowsReader
from embedserve.engine.pooled_values import to_float16
from embedserve.errors import (
    DeadlineExceededError,
    EmbedServeError,
    EngineError,
    RequestTooLargeError,
)
from embedserve.fanout.batch_fanout import BatchFanout, Finish
from embedserve.fanout.local_part import LocalPart
from embedserve.fanout.part_messages import PartMessages
from embedserve.fanout.parted_version import PartedVersion
from embedserve.fanout.row_cache import RowCache
from embedserve.fanout.row_fetcher import RowFetcher
from embedserve.fanout.values_budget import BATCHES_MAX
from embedserve.lookup_types import Batch
from embedserve.on_missing import MissingPolicy
from embedserve_store.errors import UnopenedError
from embedserve_store.goldens.goldens_file import Goldens
from embedserve_store.goldens.parity import check_published
from embedserve_store.goldens.reference_pooling import row_numbers
from embedserve_store.model_version import ModelVersion
from embedserve_store.parts.part import Part

if TYPE_CHECKING:
    from embedserve.fanout.shards import Shards

GOLDENS_S_MAX = 30.0
"""Seconds for one lookup of the goldens of a version, before it serves."""
FETCH_S_MAX = 1.0
"""Seconds for one lookup of rows for the row cache."""
LOOP_POLL_S = 0.5
"""Interval of the check whether the event loop that carries a lookup has ended."""
GOLDENS_PAUSE_S = 1.0
"""Seconds between two lookups of goldens that are not answered."""
GOLDENS_RETRY_S_MAX = 10.0
"""Seconds after which a lookup of goldens is not repeated."""


class RouterEngine:
    """One version of a model whose rows are in shards.

    Attributes:
        manifest, translator, plan: as those of Engine. Ids become row numbers in the router.
        fingerprint, part, spare_rows: as those of Engine that serves a whole version.
        expected_parts: what the shards of each part have to serve.
        local_tables: names of the tables that are looked up in this process.
        traces_calls: whether calls of shards are recorded for traces.
        rows_reader: None, as rows never change.
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
        partial_dtype: str,
        on_missing: MissingPolicy,
        local: LocalPart | None,
        inline_bytes_max: int,
        row_cache_bytes: int,
    ) -> None:
        """
        Args:
            version: version as a router opens it; its plan has a host plan.
            shards: caller of its parts.
            partial_dtype: dtype in which shards send their values for batches, one of
                part_messages.VALUE_DTYPES. Those for ``lookup``, and so for the goldens, are
                float32.
            on_missing: tables whose rows batches may lack. Values of ``lookup``, and so of the
                goldens, lack none.
            local: the tables of ``version`` that are looked up in this process; None for none.
            inline_bytes_max: bytes read and written by the largest lookup of an engine that runs
                on the event loop. A byte of a router counts COST_FACTOR times.
            row_cache_bytes: bytes for rows that are looked up often. Values of ``lookup``, and so
                of the goldens, come from the shards.
        """
        manifest = version.manifest
        self.manifest = manifest
        self.translator = version.translator
        self.plan = version.plan
        self.rows_reader: RowsReader | None = None
        self.traces_calls = shards.traces_calls
        self._version = version
        self._shards = shards
        self._local = local
        self.local_tables = () if local is None else local.tables
        self._parted = PartedVersion(version, shards, local, inline_bytes_max)
        self.expected_parts = self._parted.expected
        self._exact = self._parted.messages("float32")
        self._messages = self._parted.messages(partial_dtype)
        fails = {one.feature for one in manifest.columns if on_missing.fails(one.table.name)}
        features = range(len(manifest.features))
        self._required = np.array([feature in fails for feature in features])
        self._cache = self._parted.row_cache(row_cache_bytes)
        self._fetcher = RowFetcher(self._cache, manifest) if self._cache is not None else None
        self.fingerprint = manifest.fingerprint
        self.part: Part | None = None
        self.spare_rows = None

    @property
    def remote(self) -> RemoteLookups:
        """Returns the engine itself; see batching.lookup_engine.RemoteLookups. An attribute would
        be a reference cycle, which keeps the version open."""
        return self

    def begin(self, batch: Batch, deadline_s: float, finish: Finish) -> None:
        """Begins the lookup of ``batch``; see batching.lookup_engine.RemoteLookups."""
        self._begin(batch, deadline_s, finish, self._messages, self._required, self._cache)
        if self._fetcher is not None:
            self._fetcher.fetch_if_due(self._begin_fetch)

    def _begin_fetch(self, batch: Batch, finish: Finish) -> None:
        """Begins a lookup of rows for the row cache, in the shards and without rounding. It may
        lack rows of parts that have no replica."""
        deadline_s, required = perf_counter() + FETCH_S_MAX, np.zeros_like(self._required)
        self._begin(batch, deadline_s, finish, self._exact, required, None)

    def _begin(
        self,
        batch: Batch,
        deadline_s: float,
        finish: Finish,
        messages: Sequence[PartMessages],
        required: np.ndarray,
        cache: RowCache | None,
    ) -> None:
        """Begins the lookup of ``batch`` once there is room for the values of its parts."""
        until_s = monotonic() + deadline_s - perf_counter()
        nbytes, budget = self._parted.values_bytes(batch, cache), self._shards.budget

        def end(values: np.ndarray | EmbedServeError) -> None:
            try:
                finish(values)
            finally:
                budget.end(nbytes)

        fanout = BatchFanout(self._parted, batch, messages, required, cache, until_s, end)
        budget.begin(nbytes, fanout.begin, until_s, lambda: finish(_late_error()))

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
                deadline_s, required = perf_counter() + GOLDENS_S_MAX, np.ones_like(self._required)
                self._begin(batch, deadline_s, end, self._exact, required, None)
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
        bags, numbers = goldens.bags, row_numbers(goldens.bags, self.translator)
        until_s = monotonic() + GOLDENS_RETRY_S_MAX
        while True:
            try:
                answers = self.lookup(numbers, bags.lengths.reshape(-1), bags.weights)
                break
            except (EmbedServeError, TimeoutError) as error:
                if isinstance(error, RequestTooLargeError) or monotonic() >= until_s:
                    why = str(error) or "the event loop was busy"
                    raise UnopenedError(f"{where}: its goldens were not answered: {why}") from error
            sleep(GOLDENS_PAUSE_S)
        check_published(answers, goldens, self.manifest, where)

    def check(self) -> None:
        """Raises StoreError if the rows in this process have changed. The shards check theirs."""
        if self._local is not None:
            self._local.check()


def _late_error() -> DeadlineExceededError:
    return DeadlineExceededError("the deadline passed while its batch waited for others")


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
