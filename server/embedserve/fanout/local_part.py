"""The part of a version that a router holds itself: its small tables, looked up in this process.

engine/engine.py does the lookups, as in a shard. Lookups in this part need no call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np

from embedserve.batching.lookup_engine import FAILED
from embedserve.errors import EmbedServeError, EngineError
from embedserve.fanout.partition import PartLookup
from embedserve.metrics.rate_limited_logger import RateLimitedLogger
from embedserve_store import ModelVersion, verify

if TYPE_CHECKING:
    from embedserve.engine.engine import Engine
    from embedserve.engine.programs import Programs

logger = logging.getLogger(__name__)

OnValues = Callable[[np.ndarray | EmbedServeError], object]


class LocalPart:
    """Looks up the tables of one version that the router holds.

    Attributes:
        tables: names of the tables.
    """

    def __init__(self, engine: Engine, inline_bytes_max: int) -> None:
        """
        Args:
            engine: engine of these tables, whose rows are sums.
            inline_bytes_max: bytes read and written by the largest lookup that runs on the event
                loop.
        """
        self.tables = tuple(table.name for table in engine.manifest.tables)
        self._engine = engine
        self._inline_bytes_max = inline_bytes_max
        self._row_bytes_max = max(table.row_bytes for table in engine.manifest.tables)
        self._log = RateLimitedLogger(logger)

    def look_up(self, lookup: PartLookup, on_values: OnValues) -> None:
        """Looks ``lookup`` up on the event loop, or in a thread if it is large. Calls ``on_values``
        on the event loop with its float32 values, or the error for the callers, after it has
        returned."""
        loop = asyncio.get_running_loop()
        if self._work_bytes(lookup) <= self._inline_bytes_max:
            loop.call_soon(on_values, self._values(lookup))
            return
        looking_up = loop.run_in_executor(None, self._values, lookup)
        looking_up.add_done_callback(lambda done: on_values(done.result()))

    def _work_bytes(self, lookup: PartLookup) -> int:
        """Returns about how many bytes a lookup reads and writes, at most."""
        examples, columns = lookup.shape
        return lookup.ids.size * self._row_bytes_max + 4 * examples * columns

    def _values(self, lookup: PartLookup) -> np.ndarray | EmbedServeError:
        try:
            values = self._engine.lookup(lookup.ids, lookup.lengths, lookup.weights)
            return values.reshape(lookup.shape)
        except Exception:
            kind = f"lookups of {self._engine.manifest.model!r} in the router fail"
            what = f"lookup of {lookup.ids.size} ids"
            self._log.log(logging.ERROR, kind, what, with_traceback=True)
            return EngineError(FAILED)

    def check(self) -> None:
        """Raises StoreError if the rows have changed since the start."""
        self._engine.check()


class LocalParts:
    """Opens the local parts of versions, and keeps their compiled lookups for later versions of the
    same layout. Not thread-safe."""

    def __init__(self, inline_bytes_max: int) -> None:
        """
        Args:
            inline_bytes_max: as for LocalPart.
        """
        self._inline_bytes_max = inline_bytes_max
        self._programs: Programs | None = None
        self._engines: WeakSet[Engine] = WeakSet()

    def open(self, version: ModelVersion) -> LocalPart | None:
        """Returns the local part of ``version``, warm and with every byte compared with its
        checksum; None if it has none.

        Raises:
            StoreError: the rows are not the published ones, or cannot be served.
        """
        local = version.local_version()
        if local is None:
            return None
        from embedserve.engine.programs import Programs
        from embedserve.engine.restore import restore

        verify(local)
        programs = self._programs = self._programs or Programs()
        engine = restore(
            local,
            "cpu:1",
            programs=programs,
            may_compile=not any(one.runs_modules for one in self._engines),
        )
        self._engines.add(engine)
        programs.add_warm(engine)
        return LocalPart(engine, self._inline_bytes_max)
