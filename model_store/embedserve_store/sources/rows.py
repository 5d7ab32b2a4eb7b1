"""The rows of one table of a source, whatever they come from, read piece by piece.

Sources give them, the writer of a version reads them once from first to last, and the goldens
read a few. Nobody holds a whole table. Imports torch only when called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from embedserve_store.format.table_spec import TableSpec
from embedserve_store.format.tables_file import BLOCK_BYTES
from embedserve_store.goldens.row_checksums import row_checksums

if TYPE_CHECKING:
    import torch

SOURCE_DTYPES = ("float32", "float16", "bfloat16")
"""What rows may come as. bfloat16 rows are stored as the float32 that they are exactly."""


class TableRows(Protocol):
    """A table's rows [rows, dim] in a source."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> str:
        """One of SOURCE_DTYPES."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows [stop - start, dim] on the CPU, in the source's dtype.

        Raises:
            StoreError: the source cannot be read there.
        """

    def gather(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        """The rows of ``numbers`` [n, dim], as ``read``."""


class TensorRows:
    """Rows of a plain tensor on any device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()

    @property
    def is_meta(self) -> bool:
        """Whether there are no values."""
        return self._tensor.is_meta

    @property
    def shape(self) -> tuple[int, int]:
        rows, dim = self._tensor.shape
        return rows, dim

    @property
    def dtype(self) -> str:
        return str(self._tensor.dtype).removeprefix("torch.")

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._tensor[start:stop].cpu()

    def gather(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        import torch

        return self._tensor[torch.from_numpy(numbers).to(self._tensor.device)].cpu()


def checksums_of(rows: TableRows, first_column: int = 0) -> NDArray[np.uint64]:
    """Returns the checksum of each row (row_checksums.py), read by blocks.

    ``first_column`` is the column of the table that the rows, of a column-wise shard, begin at.
    """
    count, dim = rows.shape
    step = max(1, BLOCK_BYTES // (4 * dim))
    blocks = [
        row_checksums(rows.read(start, min(start + step, count)).float().numpy(), first_column)
        for start in range(0, count, step)
    ]
    return np.concatenate(blocks) if blocks else np.zeros(0, np.uint64)


def source_rows(
    rows: Mapping[str, TableRows],
) -> Callable[[TableSpec, NDArray[np.int64]], NDArray[np.float32]]:
    """Gives the float32 values [n, dim] of a table's rows in ``rows`` (by table)."""

    def rows_of(table: TableSpec, wanted: NDArray[np.int64]) -> NDArray[np.float32]:
        result: NDArray[np.float32] = rows[table.name].gather(wanted).float().numpy()
        return result

    return rows_of
