"""Looks one batch up in its parts: divides it, adds what they return, and notes what fails or is
missing without a part.

The event loop divides and adds a small batch, threads a large one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from embedserve.batching.lookup_executor import FAILED
from embedserve.errors import EmbedServeError, EngineError, MissingPartError
from embedserve.fanout.part_messages import PartMessages
from embedserve.lookup_types import Batch
from embedserve.shard_client.reply import Reply

if TYPE_CHECKING:
    from embedserve.fanout.router_engine import RouterEngine

T = TypeVar("T")
Finish = Callable[[np.ndarray | EmbedServeError], None]
"""Takes the values of a batch, or the error that fails all of it."""


class BatchFanout:
    """The lookups of one batch in its parts, and what becomes of their replies."""

    def __init__(
        self,
        engine: RouterEngine,
        batch: Batch,
        messages: Sequence[PartMessages],
        required: np.ndarray,
        until_s: float,
        finish: Finish,
    ) -> None:
        """
        Args:
            messages: messages of each part.
            required: bool [features], whether examples fail if a part with their ids is missing.
            until_s: time.monotonic() at which the lookups fail.
            finish: called once, and never before ``begin`` has returned.
        """
        self.messages = messages
        self._engine = engine
        self._batch = batch
        self._required = required
        self._until_s = until_s
        self._finish = finish
        self._missing: np.ndarray | None = None  # ids of missing parts, int [features, examples]
        self._is_large = engine.is_large(batch)
        self._loop = asyncio.get_running_loop()

    def begin(self) -> None:
        """Divides the batch, and begins its lookups."""
        try:
            if self._is_large:
                self._run(self._divide_and_prepare, lambda _: self._look_up())
                return
            self._divide()
            self._look_up()
            self._pending.prepare()  # while the parts look up
        except Exception:
            self._give_up()

    def _run(self, step: Callable[[], T], then: Callable[[T], None]) -> None:
        """Calls ``step``, in a thread for a large batch, and ``then`` with its result on the event
        loop."""
        if self._is_large:
            with suppress(RuntimeError):  # no thread can be started
                running = self._loop.run_in_executor(None, step)
                running.add_done_callback(partial(self._on_run, then))
                return
        then(step())

    def _on_run(self, then: Callable[[T], None], running: asyncio.Future[T]) -> None:
        try:
            then(running.result())
        except Exception:
            self._give_up()

    def _divide(self) -> None:
        self._pending = self._engine.divide(self._batch)
        self._lookups = self._pending.lookups()

    def _divide_and_prepare(self) -> None:
        self._divide()
        self._pending.prepare()

    def _give_up(self) -> None:
        """Finishes the batch with the exception that is being handled; replies are ignored from now
        on."""
        self._engine.log_failure(self._batch)
        self._loop.call_soon(self._complete, EngineError(FAILED))

    def _complete(self, values: np.ndarray | EmbedServeError) -> None:
        """Finishes the batch, unless it is finished already."""
        finish, self._finish = self._finish, _ignore
        finish(values)

    def _look_up(self) -> None:
        self._left = len(self._lookups)
        if self._lookups:
            self._engine.look_up(self._lookups, self, self._until_s, self._batch)
        else:
            self._loop.call_soon(self._end)

    def on_reply(self, index: int, reply: Reply) -> None:
        """Takes the reply to the lookup at ``index``."""
        lookup = self._lookups[index]
        self.take(index, self._engine.read_reply(lookup, self.messages[lookup.part], reply))

    def take(self, index: int, values: np.ndarray | EmbedServeError) -> None:
        """Takes the values of the lookup at ``index``, or why there are none; the last ones end the
        batch."""
        part = self._lookups[index].part
        try:
            if isinstance(values, EmbedServeError):
                self._fail(part, values)
                self._end_if_last()
            else:
                add = partial(self._pending.add, part, values)
                self._run(add, lambda _: self._end_if_last())
        except Exception:
            self._give_up()

    def _end_if_last(self) -> None:
        self._left -= 1
        if not self._left:
            self._end()

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

    def _end(self) -> None:
        """Adds what the parts returned, and finishes the batch."""
        try:
            self._run(self._result, self._complete)
        except Exception:
            self._give_up()

    def _result(self) -> np.ndarray:
        return self._engine.finish_values(self._pending.merge(), self._found_lengths())


def _ignore(values: np.ndarray | EmbedServeError) -> None:
    """Takes values that nobody waits for any more."""
