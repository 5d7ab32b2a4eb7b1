"""Changed rows of one version, in memory that the processes of a server share."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedserve_store.format.delta_manifest import position_of
from embedserve_store.format.tables_file import TablesFile
from embedserve_store.model_version import ModelVersion


class RowsFullError(Exception):
    """The memory of the changed rows has no room for a delta. No row was changed."""


@dataclass(frozen=True)
class LiveRows:
    """Changed rows of one version, in memory that the processes of a server share.

    Attributes:
        tables: tables of the version.
        cells: uint64 [1], the committed seq.
    """

    tables: TablesFile
    cells: NDArray[np.uint64]

    @classmethod
    def create(cls, version: ModelVersion, memory_bytes: int, readers: int) -> LiveRows:
        """Returns the unchanged rows of ``version``.

        Args:
            memory_bytes: room for changed rows.
            readers: number of processes that look rows up.

        Raises:
            StoreError: the version's fields of compaction are wrong.
        """
        live = cls(version.tables, np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint64, 1))
        live.cells[0] = position_of(version.manifest).seq
        return live

    @property
    def seq(self) -> int:
        """Last delta whose rows are looked up."""
        return int(self.cells[0])
