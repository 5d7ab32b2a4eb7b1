"""Runs lookups in the engine of one version of a model: inline, in threads or in other servers.

A failure of a lookup is logged, and the requests of the batch get an error instead of values.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np

from embedserve.batching.join import adapt_and_join
from embedserve.batching.lookup_engine import LookupEngine
from embedserve.batching.split import (
    in_request_order,
    select_output_keys,
    split,
    split_by_examples,
)
from embedserve.deltas.rows_reader import BatchView, end_view
from embedserve.errors import EmbedServeError, EngineError, InvalidRequestError
from embedserve.lookup_types import Batch, LookupRequest, LookupResult
from embedserve.metrics.rate_limited_logger import RateLimitedLogger
from embedserve.model_info import ModelInfo
from embedserve_store.errors import StoreError

logger = logging.getLogger(__name__)

LookedUp = tuple[np.ndarray | EmbedServeError, float]
"""Values of a batch or the error of its lookup, and the duration of the lookup in seconds."""

FAILED = "the lookup failed; the server's log says why"


class Joined(NamedTuple):
    """A batch that was joined in a thread."""

    batch: Batch | None
    """The batch, None if no request is valid."""
    requests: dict[int, LookupRequest]
    """Its requests in the model's order, by position among all requests."""
    errors: dict[int, InvalidRequestError]
    """Errors of the other requests, by position."""
    sub_batches: list[Batch]
    """The batch, divided for the threads of ``LookupExecutor.submit``."""


class LookupExecutor:
    """Looks batches up: inline, in threads, or in other servers.

    Attributes:
        engine: engine that holds the rows.
        waits_for_device: whether the engine waits for a device, so that no lookup may run on the
            event loop.
        traces_calls: whether calls of other servers are recorded for traces.
    """

    def __init__(
        self, engine: LookupEngine, model: ModelInfo, executor: Executor, threads: int
    ) -> None:
        """
        Args:
            executor: thread pool for batches that are too large for the event loop's thread.
            threads: number of sub-batches of a large batch of a pooled model. Not used for an
                engine that waits for its device. The executor has more threads than that, so that
                another batch can run concurrently.
        """
        self.engine = engine
        self.waits_for_device = engine.waits_for_device
        self.traces_calls = engine.remote is not None and engine.remote.traces_calls
        self._model = model
        self._executor = executor
        is_split = model.is_pooled and not self.waits_for_device and engine.remote is None
        self._sub_batches_max = threads if is_split else 1
        self._log = RateLimitedLogger(logger)

    def run(self, batch: Batch, as_float16: bool = False) -> LookedUp:
        """Looks ``batch`` up on the calling thread, and ends its view.

        Returns values in request order, float16 ones if the engine can and ``as_float16`` allows
        it, or the error of a failure that it has logged.
        """
        start_s, view = perf_counter(), batch.view
        values: np.ndarray | EmbedServeError
        try:
            ids = batch.ids if view is None else batch.rows_in_view()
            values = self.engine.lookup(ids, batch.lengths, batch.weights, as_float16)
            values = in_request_order(values, batch, self._model)
        except Exception:
            self.log_failure(f"lookup of {batch.ids.size} ids in {batch.batch_size} examples")
            values = EngineError(FAILED)
        finally:
            if view is not None:
                view.end()
        return values, perf_counter() - start_s

    def join_in_thread(
        self, requests: Sequence[LookupRequest], view: BatchView | None
    ) -> asyncio.Future[Joined]:
        """Joins ``requests``, in any order of features, for a lookup in ``view``.

        Raises:
            RuntimeError: the executor has been shut down.
        """
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._executor, self._join, requests, view)

    def _join(self, requests: Sequence[LookupRequest], view: BatchView | None) -> Joined:
        change = None if view is None else view.id_overrides()
        batch, valid, errors = adapt_and_join(requests, self._model, change)
        if batch is None:
            return Joined(None, valid, errors, [])
        batch.view = view
        return Joined(batch, valid, errors, self._sub_batches_of(batch))

    def _sub_batches_of(self, batch: Batch) -> list[Batch]:
        """Divides ``batch`` by examples. The ids of its sub-batches are the rows in its view
        already, so that they have no view.

        The batch itself keeps the published rows, as metrics count those.
        """
        resolved = replace(batch, ids=batch.rows_in_view(), view=None)
        return split_by_examples(resolved, len(self._model.features), self._sub_batches_max)

    def submit(
        self,
        batch: Batch,
        sub_batches: Sequence[Batch],
        as_float16: bool,
        deadline_s: float,
        finish: Callable[[list[LookedUp]], None],
    ) -> None:
        """Looks ``batch`` up in threads or in other servers, and ends its view. Each thread
        gets one sub-batch, because a kernel call uses one thread.

        ``finish`` is called on the event loop with the results of all sub-batches. Other servers
        give the lookup up at ``deadline_s``, perf_counter seconds.

        Args:
            sub_batches: ``batch``, divided, if it was joined in a thread; else empty.

        Raises:
            RuntimeError: the executor has been shut down.
            StoreError: as RowsReader.rows_in_view.
        """

        if (remote := self.engine.remote) is not None:
            assert batch.view is None  # rows of a model in parts never change
            remote.begin(
                batch, deadline_s, partial(self._end_remote, batch, finish, perf_counter())
            )
            return

        def end(done: asyncio.Future[list[LookedUp]]) -> None:
            end_view(batch.view)
            finish(done.result())

        loop = asyncio.get_running_loop()
        try:
            looking_up = asyncio.gather(
                *(
                    loop.run_in_executor(self._executor, self.run, sub_batch, as_float16)
                    for sub_batch in sub_batches or self._sub_batches_of(batch)
                )
            )
        except Exception:
            end_view(batch.view)
            raise
        looking_up.add_done_callback(end)

    def _end_remote(
        self,
        batch: Batch,
        finish: Callable[[list[LookedUp]], None],
        start_s: float,
        values: np.ndarray | EmbedServeError,
    ) -> None:
        if isinstance(values, np.ndarray):
            try:
                values = in_request_order(values, batch, self._model)
            except Exception:
                self.log_failure(f"lookup of {batch.ids.size} ids in other servers")
                values = EngineError(FAILED)
        finish([(values, perf_counter() - start_s)])

    def is_split_quick(self, requests: Sequence[LookupRequest]) -> bool:
        """Returns whether the result of each of ``requests`` is a slice of the batch's."""
        return self._model.is_pooled and all(
            request.output is None and request.output_dtype == "float32" for request in requests
        )

    def split_in_thread(
        self, requests: Sequence[LookupRequest], batch: Batch, value_chunks: Sequence[np.ndarray]
    ) -> asyncio.Future[list[LookupResult]]:
        """Calls ``split`` in a thread.

        Raises:
            RuntimeError: the executor has been shut down.
        """
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._executor, self.split, requests, batch, value_chunks)

    def split(
        self, requests: Sequence[LookupRequest], batch: Batch, value_chunks: Sequence[np.ndarray]
    ) -> list[LookupResult]:
        """Returns the result of each request of ``batch``, with the keys and in the dtype that it
        asks for.

        Args:
            value_chunks: values of the batch in request order.
        """
        results = split(value_chunks, batch, requests, self._model)
        for request, result in zip(requests, results, strict=True):
            if request.output is not None:
                select_output_keys(result, request.output)
            if request.output_dtype == "float16":
                self._round(result)
        return results

    def _round(self, result: LookupResult) -> None:
        """Converts the values of ``result`` to float16."""
        result.values = self.engine.to_float16(result.values)
        result.extra_chunks = [self.engine.to_float16(chunk) for chunk in result.extra_chunks]

    async def find_damage(self) -> str:
        """Returns how the rows have changed since the start, "" if they have not.

        The check runs in a thread of the executor, concurrently with lookups.
        """
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._executor, self.engine.check)
        except StoreError as error:
            return str(error)
        except Exception:
            self.log_failure("looking whether the rows have changed")
        return ""

    def log_failure(self, what: str) -> None:
        """Logs the unexpected error that is being handled, with a rate limit."""
        kind = f"lookups of {self._model.name!r} fail"
        self._log.log(logging.ERROR, kind, what, with_traceback=True)
