"""Looks one batch up in its parts: divides it, calls them, adds what they return, and notes what
fails or is missing without a part.

The event loop divides and adds a small batch, threads a large one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from embedserve.batching.lookup_engine import FAILED
from embedserve.engine.pooled_values import divide_means
from embedserve.errors import (
    DeadlineExceededError,
    EmbedServeError,
    EngineError,
    MissingPartError,
    NotReadyError,
    OverloadedError,
    RequestTooLargeError,
)
from embedserve.fanout.part_messages import MismatchedResponseError, PartMessages
from embedserve.fanout.parted_version import ExpectedPart, PartedBatch, PartedVersion
from embedserve.fanout.partition import PartLookup
from embedserve.fanout.row_cache import RowCache
from embedserve.lookup_types import Batch
from embedserve.shard_client.reply import (
    DEADLINE_EXCEEDED,
    OK,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNKNOWN,
    Reply,
    status_name,
)

T = TypeVar("T")
Finish = Callable[[np.ndarray | EmbedServeError], None]
"""Takes the values of a batch, or the error that fails all of it."""


class BatchFanout:
    """The lookups of one batch in its parts, and what becomes of their replies."""

    def __init__(
        self,
        version: PartedVersion,
        batch: Batch,
        messages: Sequence[PartMessages],
        required: np.ndarray,
        cache: RowCache | None,
        until_s: float,
        finish: Finish,
    ) -> None:
        """
        Args:
            messages: messages of each part that shards serve.
            required: bool [features], whether examples fail if a part with their ids is missing.
            cache: rows that need no lookup; None for none.
            until_s: time.monotonic() at which the lookups fail.
            finish: called once, and never before ``begin`` has returned.
        """
        self._version = version
        self._batch = batch
        self._messages = messages
        self._required = required
        self._cache = cache
        self._until_s = until_s
        self._finish = finish
        self._values: dict[int, np.ndarray] = {}  # of the parts that have answered
        self._missing: list[np.ndarray] = []  # ids of missing parts, each [features, examples]
        self._is_large = version.is_large(batch, has_cache=cache is not None)
        self._loop = asyncio.get_running_loop()
        self._divided: PartedBatch  # from here on set by _divide
        self._lookups: list[PartLookup]
        self._left: int  # lookups that have not ended

    def begin(self) -> None:
        """Divides the batch, and begins its lookups."""
        try:
            if self._is_large:
                self._run(self._divide_and_prepare, lambda _: self._send_lookups())
                return
            self._divide()
            self._send_lookups()
            self._divided.prepare()  # while the parts look up
        except Exception:
            self._give_up()

    def _run(self, step: Callable[[], T], then: Callable[[T], None]) -> None:
        """Calls ``step``, in a thread for a large batch, and ``then`` with its result on the event
        loop.

        Raises:
            RuntimeError: no thread can be started. Another one may call ``step`` later.
        """
        if self._is_large:
            running = self._loop.run_in_executor(None, step)
            running.add_done_callback(partial(self._on_run, then))
        else:
            then(step())

    def _on_run(self, then: Callable[[T], None], running: asyncio.Future[T]) -> None:
        try:
            then(running.result())
        except Exception:
            self._give_up()

    def _divide(self) -> None:
        self._divided = self._version.divide(self._batch, self._cache)
        self._lookups = self._divided.lookups()
        self._left = len(self._lookups)

    def _divide_and_prepare(self) -> None:
        self._divide()
        self._divided.prepare()

    def _give_up(self) -> None:
        """Logs the exception that is being handled, and fails the batch. What it returns later is
        discarded."""
        kind = f"a lookup in the parts of {self._version.model!r} fails"
        what = f"{self._batch.ids.size} ids"
        self._version.log.log(logging.ERROR, kind, what, with_traceback=True)
        self._loop.call_soon(self._complete, EngineError(FAILED))

    def _complete(self, values: np.ndarray | EmbedServeError) -> None:
        """Finishes the batch, unless it is finished already."""
        finish, self._finish = self._finish, _ignore
        finish(values)

    def _send_lookups(self) -> None:
        """Begins the lookups. The one in this process, if any, is the last."""
        version, lookups = self._version, self._lookups
        if not lookups:
            self._loop.call_soon(self._end)
            return
        local = version.local if lookups[-1].part == version.local_number else None
        for i, lookup in enumerate(lookups if local is None else lookups[:-1]):
            message = self._messages[lookup.part].encode(lookup)
            on_reply = partial(self._on_reply, i)
            expected = version.expected[lookup.part]
            version.shards.call_part(expected, message, self._until_s, on_reply, self._batch.calls)
        if local is not None:
            local.look_up(lookups[-1], partial(self._take, len(lookups) - 1))

    def _on_reply(self, index: int, reply: Reply) -> None:
        """Takes the reply to the lookup at ``index``."""
        self._take(index, self._read(self._lookups[index], reply))

    def _read(self, lookup: PartLookup, reply: Reply) -> np.ndarray | EmbedServeError:
        """Returns the values of ``reply`` to ``lookup``, or the error for the callers."""
        if reply.status == OK:
            try:
                return self._messages[lookup.part].decode(reply.payload, lookup.shape)
            except MismatchedResponseError as error:
                reply = Reply(UNKNOWN, f"the response {error}")
        expected = self._version.expected[lookup.part]
        what = f"{status_name(reply.status)}: {reply.message}"
        self._version.log.log(logging.ERROR, f"{expected} fails", what)
        return _error_of(reply, expected)

    def _take(self, index: int, values: np.ndarray | EmbedServeError) -> None:
        """Takes the values of the lookup at ``index``, or why there are none; the last ones end the
        batch."""
        part = self._lookups[index].part
        try:
            if isinstance(values, EmbedServeError):
                find = partial(self._lacking, part, isinstance(values, MissingPartError))
                self._run(find, partial(self._fail, part, values))
            else:
                self._values[part] = values
                self._end_if_last()
        except Exception:
            self._give_up()

    def _end_if_last(self) -> None:
        self._left -= 1
        if not self._left:
            self._end()

    def _lacking(self, part: int, is_missing: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the examples that fail without ``part``, and the numbers of its ids if others
        lack some, int [features, examples]."""
        counts = self._divided.count_ids_on(part)
        fails = (counts[self._required] if is_missing else counts).any(axis=0)
        lacks = counts.any(axis=0) & ~fails
        return np.flatnonzero(fails), counts if lacks.any() else None

    def _fail(
        self,
        part: int,
        error: EmbedServeError,
        lacking: tuple[np.ndarray, np.ndarray | None],
    ) -> None:
        """Notes which examples fail without ``part``, and what the others lack."""
        failed, counts = lacking
        if failed.size:
            self._batch.failures = [*self._batch.failures, (failed, error)]
        if counts is not None:
            self._missing.append(counts)
            self._batch.missing_parts = [*self._batch.missing_parts, part]
        self._end_if_last()

    def _found_lengths(self) -> np.ndarray:
        """Returns the lengths of the batch without the ids of missing parts, which are counted by
        request."""
        batch = self._batch
        if not self._missing:
            return batch.lengths
        missing = np.add.reduce(self._missing)
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
        """Returns the values of the batch: sums, or means where a table has mean pooling."""
        values, lengths = self._divided.merge(self._values), self._found_lengths()
        if self._version.means:
            divide_means(values, lengths, self._version.means)
        return values


def _error_of(reply: Reply, expected: ExpectedPart) -> EmbedServeError:
    """Returns the error for callers whose lookup of ``expected`` ended with ``reply``: a
    MissingPartError if no replica is there."""
    if reply.status == UNAVAILABLE:
        kind = MissingPartError if reply.is_lost else NotReadyError
        return kind(f"{expected} is not available")
    if reply.is_too_large:
        return RequestTooLargeError(
            f"{expected} rejects a request of this size: {reply.message}. Send fewer examples or "
            "ids, or raise this limit of the shards"
        )
    if reply.status == RESOURCE_EXHAUSTED:
        overloaded = OverloadedError(f"{expected} is overloaded")
        overloaded.retry_after_s = max(reply.retry_after_s, overloaded.retry_after_s)
        return overloaded
    if reply.status == DEADLINE_EXCEEDED:
        return DeadlineExceededError(f"{expected} has not answered in time")
    return EngineError(f"the lookup in {expected} failed; the server's log says why")


def _ignore(values: np.ndarray | EmbedServeError) -> None:
    """Takes values that nobody waits for any more."""
