"""Interface of an engine, as the batcher uses it."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from embedserve.deltas.rows_reader import RowsReader
from embedserve.lookup_types import Batch


class LookupEngine(Protocol):
    """One restored version of a model; engine/engine.py has the implementation.

    Attributes:
        waits_for_device: whether another device runs the lookups while the calling thread waits.
            Such lookups never run on the event loop's thread and are not split into chunks. The
            device receives the next lookup before it has finished the last.
        rows: reader of the rows that changed since the version was published; None where no row
            ever changes.
        replicas: number of copies of the rows, each on its own device. Replicas look batches up
            concurrently. 1 for an engine that waits for no device.
    """

    waits_for_device: bool
    replicas: int
    rows: RowsReader | None

    def lookup(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
        as_float16: bool = False,
    ) -> np.ndarray: ...

    def to_float16(self, values: np.ndarray) -> np.ndarray: ...

    def check(self) -> None: ...


def begin_view(engine: LookupEngine, batch: Batch) -> None:
    """Gives ``batch`` the newest view of the rows: its ids become row numbers of that view.

    ``end_view`` must be called after the lookup.

    Raises:
        StoreError: as RowsReader.newest.
    """
    rows = engine.rows
    if rows is None:
        return
    batch.view = rows.begin()
    counts = batch.ids_per_feature
    if batch.unknown_counts is not None:  # skipped ids may be gone
        counts = batch.lengths.reshape(len(counts), -1).sum(axis=1)
    batch.ids = rows.newest(batch.ids, counts, batch.view[0])


def end_view(engine: LookupEngine, batch: Batch) -> None:
    """Ends the use of the batch's view; does nothing if it has none."""
    if engine.rows is not None and batch.view is not None:
        engine.rows.end(batch.view[0])
