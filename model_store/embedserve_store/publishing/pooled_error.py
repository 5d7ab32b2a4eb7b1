"""Measures how far pooled vectors of the stored rows are from the source's, for the publish report.

Draws bags for each table, pools the source's rows in float32 and the stored rows, and compares.
Reads only the rows in these bags. Imports torch only through the source's rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedserve_store.comparison.row_diff import cosines
from embedserve_store.format.table_spec import TableSpec, row_bytes
from embedserve_store.format.tables_file import TablesFile
from embedserve_store.goldens.reference_pooling import pool_rows, stored_rows
from embedserve_store.sources.rows import TableRows

BAGS = 256
IDS_PER_BAG_MAX = 8
_SEED = 20240301


@dataclass(frozen=True)
class PooledError:
    """Errors of one table over sampled bags of 1 to 8 rows; of 1 row if the table is not pooled."""

    relative_l2: float
    """L2 norm of the difference divided by the L2 norm of the source's vectors, over all bags
    together. If the source's vectors are all zero, the norm of the difference itself."""
    cosine: float
    """Mean over the bags of the cosine between the stored and the source's pooled vector."""
    cosine_min: float
    """Lowest cosine of any bag. It exaggerates the error of a bag of tiny values."""
    max_abs: float
    """Largest absolute difference of any value."""
    bytes_saved: int
    """Bytes that the table saves compared with float32."""


def pooled_error(table: TableSpec, source: TableRows, tables: TablesFile) -> PooledError:
    """Compares the stored rows of ``table`` with ``source``, on the same bags every time.

    Raises:
        StoreError: the source cannot be read.
    """
    random = np.random.default_rng(_SEED)
    lengths = random.integers(1, IDS_PER_BAG_MAX + 1, BAGS, dtype=np.int32)
    if table.pooling == "none":
        lengths[:] = 1
    numbers = random.integers(0, table.num_embeddings, int(lengths.sum()))
    trained = source.gather(numbers).float().numpy()
    stored = stored_rows(tables, table, numbers)
    saved = table.num_embeddings * row_bytes("float32", table.stored_dim) - table.nbytes
    return _compared(
        pool_rows(trained, lengths, table.pooling), pool_rows(stored, lengths, table.pooling), saved
    )


def _compared(
    source: NDArray[np.float32], stored: NDArray[np.float32], bytes_saved: int
) -> PooledError:
    exact, rounded = source.astype(np.float64), stored.astype(np.float64)
    difference = rounded - exact
    length = float(np.linalg.norm(exact))
    off = float(np.linalg.norm(difference))
    by_bag = cosines(exact, rounded)
    return PooledError(
        relative_l2=off / length if length else off,
        cosine=float(by_bag.mean()),
        cosine_min=float(by_bag.min()),
        max_abs=float(np.abs(difference).max()),
        bytes_saved=bytes_saved,
    )
