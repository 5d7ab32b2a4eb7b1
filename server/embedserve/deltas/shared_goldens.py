"""Goldens of the last delta, in memory that the applier writes and the workers read.

A worker skips the comparison if the goldens are written meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.version_memory import SharedRecord, VersionMemory
from embedserve_store.format.delta_goldens import GOLDENS_BYTES_MAX, DeltaGoldens
from embedserve_store.format.manifest import Manifest
from embedserve_store.goldens.delta_parity import check_results

ROOM = 2 * GOLDENS_BYTES_MAX + 4096
"""Bytes of the memory: the goldens, bounds of at most the same size, and their names and shapes."""

Lookup = Callable[
    [NDArray[np.int64], NDArray[np.int32], NDArray[np.float32] | None], NDArray[np.float32]
]
"""Lookup of an engine: takes row numbers, lengths and weights."""


@dataclass(frozen=True, eq=False)
class CheckedGoldens:
    """Goldens that the rows after delta ``seq`` have given, and how much each may differ."""

    seq: int
    goldens: DeltaGoldens
    bounds: NDArray[np.float32]


class SharedGoldens:
    """Goldens of the last delta that a model has applied, or is about to."""

    def __init__(self, memory: VersionMemory) -> None:
        self._record = SharedRecord(memory.take(ROOM))

    def write(self, checked: CheckedGoldens) -> None:
        """Replaces the goldens. Called before the delta is committed, by one process at a time."""
        arrays = checked.goldens.arrays | {"bounds": checked.bounds, "seq": np.array([checked.seq])}
        self._record.write(save({name: np.ascontiguousarray(one) for name, one in arrays.items()}))

    def clear(self) -> None:
        """Removes the goldens. Called before a delta without goldens is committed."""
        self._record.write(b"")

    def read(self) -> CheckedGoldens | None:
        """Returns the goldens; None if there are none, or they are being replaced."""
        if not (record := self._record.read()):
            return None
        arrays: dict[str, Any] = {"weights": None} | load(record)
        seq, bounds = arrays.pop("seq").item(), arrays.pop("bounds")
        return CheckedGoldens(seq, DeltaGoldens(**arrays, dtype="float32"), bounds)


class LiveGoldens:
    """Compares lookups of a worker with the goldens of the last delta."""

    def __init__(self, shared: SharedGoldens, rows: RowsReader, manifest: Manifest) -> None:
        self._shared, self._rows, self._manifest = shared, rows, manifest

    def check(self, lookup: Lookup) -> None:
        """Looks the bags up in the view of the delta, if that is the view of new lookups.

        Raises:
            GoldensError: a result is another than the training model's.
        """
        if (checked := self._shared.read()) is None:
            return
        view, seq = self._rows.begin()
        try:
            if seq != checked.seq:  # a further delta has been committed
                return
            goldens = checked.goldens
            counts = goldens.lengths.sum(axis=1, dtype=np.int64)
            numbers = self._rows.rows_in_view(goldens.numbers, counts, view)
            results = lookup(numbers, goldens.lengths.reshape(-1), goldens.weights)
        finally:
            self._rows.end(view)
        where = f"delta {seq} of {self._manifest.model!r}"
        check_results(results, goldens, checked.bounds, self._manifest, where)
