"""Reference implementation of pooling: computes the results for bags as FBGEMM's kernels do.

Never imports torch. A source model computes its own outputs elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from embedserve_store.format.manifest import Manifest
from embedserve_store.format.row_layout import dequantize_rows
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.format.tables_file import TablesFile
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.ids.translate import IdTranslator

RowsOf = Callable[[TableSpec, NDArray[np.int64]], NDArray[np.float32]]
"""Function that returns the float32 rows [n, dim] of a table for row numbers [n]."""


def row_numbers(bags: Bags, translator: IdTranslator) -> NDArray[np.int64]:
    """Returns the row number of each id of ``bags``, int64 [n]."""
    return translator.translate(bags.ids, bags.lengths.sum(axis=1)).rows


def pool(
    manifest: Manifest, bags: Bags, numbers: NDArray[np.int64], rows_of: RowsOf
) -> NDArray[np.float32]:
    """Returns the results for ``bags``, whose ids have the row numbers ``numbers``.

    Rows are added up in float32. A mean divides by the number of ids, even if the ids have weights,
    as FBGEMM does. For an unpooled model the results are the rows themselves, [N, dim].
    """
    feature_start = np.concatenate(([0], np.cumsum(bags.lengths.sum(axis=1))))
    blocks = []
    for columns in manifest.columns:
        span = slice(feature_start[columns.feature], feature_start[columns.feature + 1])
        rows = rows_of(columns.table, numbers[span])
        if bags.weights is not None:
            rows = rows * bags.weights[span, None]
        if manifest.is_pooled:
            rows = pool_rows(rows, bags.lengths[columns.feature], columns.table.pooling)
        blocks.append(rows)
    return np.concatenate(blocks, axis=1 if manifest.is_pooled else 0)


def pool_rows(
    rows: NDArray[np.float32], lengths: NDArray[np.int32], pooling: str
) -> NDArray[np.float32]:
    """Returns the sums or means [B, dim] of ``rows`` [n, dim] in bags of ``lengths`` [B]."""
    pooled = np.empty((len(lengths), rows.shape[1]), np.float32)
    start = 0
    for bag, end in zip(pooled, np.cumsum(lengths).tolist(), strict=True):
        np.add.reduce(rows[start:end], axis=0, out=bag)
        start = end
    if pooling == "mean":
        pooled /= np.maximum(lengths, 1).astype(np.float32)[:, None]
    return pooled


def pool_stored(
    manifest: Manifest, bags: Bags, numbers: NDArray[np.int64], tables: TablesFile
) -> NDArray[np.float32]:
    """Returns the results from the stored rows, and reads only the rows with these numbers."""
    return pool(manifest, bags, numbers, partial(stored_rows, tables))


def stored_rows(
    tables: TablesFile, table: TableSpec, numbers: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Returns the values [n, dim] of a table's rows ``numbers``, as a lookup adds them up."""
    return dequantize_rows(tables.rows(table.name)[numbers], table.dtype, table.embedding_dim)
