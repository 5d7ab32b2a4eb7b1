"""Goldens of the last delta, in memory that the applier writes and the workers read.

There is no lock. A reader verifies the record's checksum, and skips the comparison if the record
was written meanwhile.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.version_memory import VersionMemory
from embedserve_store.format.delta_goldens import BYTES_MAX, DeltaGoldens
from embedserve_store.format.manifest import Manifest
from embedserve_store.goldens.delta_parity import check_results

_HEADER = struct.Struct("<QQQQQQQ")
"""seq, rows and columns of the lengths, rows and columns of the answers, row numbers, weights."""
_CHECKSUM = struct.Struct("<I")
_START = _CHECKSUM.size + _HEADER.size
ROOM = _START + 2 * BYTES_MAX
"""Bytes of the memory: the goldens, and bounds of at most the same size."""

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

    def __init__(self, memory: VersionMemory | None = None) -> None:
        """
        Args:
            memory: as in LiveRows.
        """
        self._memory = (memory or VersionMemory.create()).take(ROOM).data

    def write(self, checked: CheckedGoldens) -> None:
        """Replaces the goldens. Called before the delta is committed, by one process at a time."""
        goldens = checked.goldens
        weights = np.zeros(0, np.float32) if goldens.weights is None else goldens.weights
        sizes = *goldens.lengths.shape, *goldens.answers.shape, len(goldens.numbers), len(weights)
        arrays = goldens.numbers, goldens.lengths, weights, goldens.answers, checked.bounds
        record = _HEADER.pack(checked.seq, *sizes)
        record += b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
        checksum = _CHECKSUM.pack(zlib.crc32(record))
        self._memory[: _CHECKSUM.size + len(record)] = checksum + record

    def clear(self) -> None:
        """Removes the goldens. Called before a delta without goldens is committed."""
        self._memory[:_START] = bytes(_START)

    def read(self) -> CheckedGoldens | None:
        """Returns the goldens; None if there are none, or they are being replaced."""
        header = bytes(self._memory[_CHECKSUM.size : _START])
        seq, features, examples, rows, columns, ids, weighted = _HEADER.unpack(header)
        answers = rows * columns
        sizes = (8 * ids, 4 * features * examples, 4 * weighted, 4 * answers, 4 * answers)
        if not seq or sum(sizes) > ROOM - _START:
            return None
        content = bytearray(self._memory[_START : _START + sum(sizes)])
        checksum = bytes(self._memory[: _CHECKSUM.size])
        if _CHECKSUM.pack(zlib.crc32(content, zlib.crc32(header))) != checksum:
            return None
        dtypes = np.int64, np.int32, np.float32, np.float32, np.float32
        starts = np.cumsum((0, *sizes))
        numbers, lengths, weights, results, bounds = (
            np.frombuffer(content[start : start + size], dtype)
            for start, size, dtype in zip(starts, sizes, dtypes, strict=False)
        )
        shape = rows, columns
        goldens = DeltaGoldens(
            numbers,
            lengths.reshape(features, examples),
            weights if weighted else None,
            results.reshape(shape),
            "float32",
        )
        return CheckedGoldens(seq, goldens, bounds.reshape(shape))


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
