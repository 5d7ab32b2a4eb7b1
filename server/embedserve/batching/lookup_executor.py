"""Has the engine of one version of a model look batches up: here, or in threads.

What goes wrong is logged, and is what its callers are answered instead of their values.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from time import perf_counter

import numpy as np

from embedserve.batching.join import split_by_examples
from embedserve.batching.lookup_engine import LookupEngine
from embedserve.batching.split import in_request_order
from embedserve.errors import EmbedServeError, EngineError
from embedserve.lookup import Batch, LookupResult
from embedserve.metrics.rate_limited_logger import RateLimitedLogger
from embedserve.model_info import ModelInfo
from embedserve_store.errors import StoreError

logger = logging.getLogger(__name__)

LookedUp = tuple[np.ndarray | EmbedServeError, float]
"""The values of a batch, or what to answer instead; and the seconds it took."""

FAILED = "the lookup failed; the server's log says why"


class LookupExecutor:
    """Looks batches up.

    Attributes:
        engine: that has the rows.
        waits_for_device: the engine does, so that no lookup may be made on the event loop.
    """

    def __init__(
        self, engine: LookupEngine, model: ModelInfo, executor: Executor, threads: int
    ) -> None:
        """
        Args:
            executor: its threads look up what is too large for the event loop's.
            threads: as many pieces a large batch is cut into, but for an engine that waits for its
                device; the executor has more, for another batch beside it.
        """
        self.engine = engine
        self.waits_for_device = engine.waits_for_device
        self._model = model
        self._executor = executor
        self._pieces = threads if model.is_pooled and not self.waits_for_device else 1
        self._log = RateLimitedLogger(logger)

    def run(self, batch: Batch, in_half: bool = False) -> LookedUp:
        """Looks ``batch`` up; ``in_half``: nobody needs its values in float32."""
        start_s = perf_counter()
        values: np.ndarray | EmbedServeError
        try:
            values = self.engine.lookup(batch.ids, batch.lengths, batch.weights, in_half)
            values = in_request_order(values, batch, self._model)
        except Exception:
            self.log_failure(f"lookup of {batch.ids.size} ids in {batch.batch_size} examples")
            values = EngineError(FAILED)
        return values, perf_counter() - start_s

    def submit(
        self,
        loop: asyncio.AbstractEventLoop,
        batch: Batch,
        in_half: bool,
        finish: Callable[[list[LookedUp]], None],
    ) -> None:
        """As now, in threads, with a piece of ``batch`` for each: the kernel uses one. ``finish``
        is told of all pieces, in the loop."""
        pieces = split_by_examples(batch, len(self._model.features), self._pieces)
        looking_up = asyncio.gather(
            *(loop.run_in_executor(self._executor, self.run, piece, in_half) for piece in pieces)
        )
        looking_up.add_done_callback(lambda done: finish(done.result()))

    def round(self, result: LookupResult) -> None:
        """Makes float16 of its values."""
        result.values = self.engine.to_float16(result.values)
        result.extra_chunks = [self.engine.to_float16(piece) for piece in result.extra_chunks]

    async def find_damage(self) -> str:
        """What has become of the rows since the start, in a thread beside the batches; "" if
        nothing has."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._executor, self.engine.check)
        except StoreError as error:
            return str(error)
        except Exception:
            self.log_failure("looking whether the rows have changed")
        return ""

    def log_failure(self, what: str) -> None:
        """Logs the error that is being handled, which nobody foresaw, now and then."""
        kind = f"lookups of {self._model.name!r} fail"
        self._log.log(logging.ERROR, kind, what, with_traceback=True)
