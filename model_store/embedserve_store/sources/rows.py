"""Defines how the rows of a source's table are read, block by block.

Every source implements TableRows. The version writer reads the rows once, from first to last, and
the goldens read a few rows. A whole table is never in memory. Imports torch only when called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from embedserve_store.format.table_spec import TableSpec
from embedserve_store.format.tables_file import BLOCK_BYTES
from embedserve_store.goldens.row_checksums import row_checksums

if TYPE_CHECKING:
    import torch

SOURCE_DTYPES = ("float32", "float16", "bfloat16")
"""Dtypes of a source's rows. bfloat16 rows are stored as float32, which represents them exactly."""


class TableRows(Protocol):
    """Rows [rows, dim] of a table in a source."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> str:
        """Dtype of the rows, one of SOURCE_DTYPES."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Returns rows [stop - start, dim] on the CPU, in the source's dtype.

        Raises:
            StoreError: the rows cannot be read.
        """

    def gather(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        """Returns the rows ``numbers`` as [n, dim]; device and dtype are as in ``read``."""


class TensorRows:
    """Rows of a plain tensor on any device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()

    @property
    def is_meta(self) -> bool:
        """Returns whether the tensor is on the meta device and has no values."""
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
    """Returns the checksum of each row (row_checksums.py), reading the rows in blocks.

    ``first_column`` is the table's column at which the rows begin, for a column-wise shard.
    """
    count, dim = rows.shape
    step = max(1, BLOCK_BYTES // (4 * dim))
    blocks = [
        row_checksums(rows.read(start, min(start + step, count)).float().numpy(), first_column)
        for start in range(0, count, step)
    ]
    return np.concatenate(blocks) if blocks else np.zeros(0, np.uint64)


def source_rows(
    rows: Mapping[str, TableRows], table: TableSpec, numbers: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Returns the float32 values [n, dim] of a table's rows ``numbers``, of the rows by table."""
    result: NDArray[np.float32] = rows[table.name].gather(numbers).float().numpy()
    return result
