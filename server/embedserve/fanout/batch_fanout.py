"""Adds what the parts return for one batch, and notes what fails or is missing without a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from embedserve.batching.lookup_executor import FAILED
from embedserve.errors import EmbedServeError, EngineError, MissingPartError
from embedserve.fanout.part_messages import PartMessages
from embedserve.fanout.partition import PartLookup
from embedserve.fanout.pooled_batch import PooledBatch
from embedserve.fanout.unpooled_batch import UnpooledBatch
from embedserve.lookup_types import Batch
from embedserve.shard_client.reply import Reply

if TYPE_CHECKING:
    from embedserve.fanout.router_engine import RouterEngine

Finish = Callable[[np.ndarray | EmbedServeError], None]
"""Takes the values of a batch, or the error that fails all of it."""


class BatchFanout:
    """The lookups of one batch in its parts, and what becomes of their replies."""

    def __init__(
        self,
        engine: RouterEngine,
        batch: Batch,
        pending: PooledBatch | UnpooledBatch,
        lookups: Sequence[PartLookup],
        messages: Sequence[PartMessages],
        required: np.ndarray,
        finish: Finish,
    ) -> None:
        """
        Args:
            required: bool [features], whether examples fail if a part with their ids is missing.
        """
        self._engine = engine
        self._batch = batch
        self._pending = pending
        self._lookups = lookups
        self._messages = messages
        self._required = required
        self._finish = finish
        self._missing: np.ndarray | None = None  # ids of missing parts, int [features, examples]
        self._values: list[np.ndarray | None] = [None] * len(lookups)
        self._left = len(lookups)

    def on_reply(self, index: int, reply: Reply) -> None:
        """Takes the reply to the lookup at ``index``."""
        lookup = self._lookups[index]
        self.take(index, self._engine.read_reply(lookup, self._messages[lookup.part], reply))

    def take(self, index: int, values: np.ndarray | EmbedServeError) -> None:
        """Takes the values of the lookup at ``index``, or why there are none; the last ones end the
        batch."""
        lookup = self._lookups[index]
        if isinstance(values, EmbedServeError):
            self._fail(lookup.part, values)
            values = np.zeros(lookup.shape, np.float32)
        self._values[index] = values
        self._left -= 1
        if not self._left:
            self.end()

    def _fail(self, part: int, error: EmbedServeError) -> None:
        """Notes which examples fail without ``part``, and what the others lack."""
        counts = self._pending.count_ids_on(part)
        is_missing = isinstance(error, MissingPartError)
        fails = (counts[self._required] if is_missing else counts).any(axis=0)
        if fails.any():
            failed = (np.flatnonzero(fails), error)
            self._batch.failures = [*self._batch.failures, failed]
        if counts[:, ~fails].any():
            self._missing = counts if self._missing is None else self._missing + counts
            self._batch.missing_parts = [*self._batch.missing_parts, part]

    def _found_lengths(self) -> np.ndarray:
        """Returns the lengths of the batch without the ids of missing parts, which are counted by
        request."""
        batch, missing = self._batch, self._missing
        if missing is None:
            return batch.lengths
        starts = np.cumsum([0, *batch.sizes[:-1]])
        batch.missing_counts = np.add.reduceat(missing, starts, axis=1, dtype=np.int64).T
        lengths: np.ndarray = batch.lengths - missing.reshape(-1)
        return lengths

    def end(self) -> None:
        """Adds what the parts returned, and finishes the batch."""
        result: np.ndarray | EmbedServeError
        try:
            summed = self._pending.merge([one for one in self._values if one is not None])
            result = self._engine.finish_values(summed, self._found_lengths())
        except Exception:
            self._engine.log_failure(self._batch)
            result = EngineError(FAILED)
        self._finish(result)
