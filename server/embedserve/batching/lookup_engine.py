"""Interface of an engine, as the batcher uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from embedserve.deltas.rows_reader import RowsReader
from embedserve.errors import EmbedServeError
from embedserve.lookup_types import Batch

FAILED = "the lookup failed; the server's log says why"
"""Message of the error of a failed lookup."""


class RemoteLookups(Protocol):
    """Lookups that other servers run. They occupy no thread of this process.

    Attributes:
        batches_max: maximum number of batches in flight. Requests gather in the queue beyond it.
        traces_calls: whether calls of the servers are recorded for traces.
    """

    batches_max: int
    traces_calls: bool

    def begin(
        self,
        batch: Batch,
        deadline_s: float,
        finish: Callable[[np.ndarray | EmbedServeError], None],
    ) -> None:
        """Begins the lookup of ``batch`` on the event loop's thread.

        Args:
            deadline_s: perf_counter seconds after which nobody needs the result.
            finish: called once on the event loop, with the values that ``lookup`` returns, or with
                the error. Where only some examples could not be looked up, the batch's ``failures``
                say which.
        """


class LookupEngine(Protocol):
    """One version of a model: engine/engine.py looks it up on this host, fanout/router_engine.py in
    other servers.

    Attributes:
        waits_for_device: whether another device runs the lookups while the calling thread waits.
            Such lookups never run on the event loop's thread and are not split into chunks. The
            device receives the next lookup before it has finished the last.
        remote: lookups of an engine that calls other servers; None if this host looks up.
        rows_reader: reader of the rows that changed since the version was published; None where no
            row ever changes.
        replicas: number of copies of the rows, each on its own device. Replicas look batches up
            concurrently. 1 for an engine that waits for no device.
    """

    waits_for_device: bool
    replicas: int
    rows_reader: RowsReader | None

    @property
    def remote(self) -> RemoteLookups | None: ...

    def lookup(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
        as_float16: bool = False,
    ) -> np.ndarray:
        """Returns the rows of ``ids``, pooled if the model pools.

        The arrays are contiguous: kernels read them as such, and do not check it.

        Args:
            ids: int64 [n] row numbers, feature-major, each below the number of rows of its table or
                as returned by ``rows_reader``.
            lengths: int32 [F * B], in the order of ``manifest.features``, with the sum n.
            weights: float32 [n], or None to count every id once. A mean divides the weighted sum by
                the number of ids, as FBGEMM does. None for an unpooled model.
            as_float16: whether the result is float16. GPUs then round before they send the result.

        Returns:
            float32 [B, sum(manifest.length_per_key)], with columns in the order of
            ``manifest.keys``. For an unpooled model [N, dim]: for each of ``manifest.keys`` one row
            per id of its feature, in the order of the ids. If each feature has one table, row i
            belongs to ids[i]. With ``as_float16``, float16 as rounded by ``to_float16``.
        """

    def to_float16(self, values: np.ndarray) -> np.ndarray:
        """Returns ``values`` rounded to float16."""

    def check(self) -> None:
        """Raises StoreError if the rows on this host are no longer as they were published, or as
        the deltas have changed them."""
