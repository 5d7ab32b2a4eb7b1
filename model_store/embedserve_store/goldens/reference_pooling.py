"""The answers to bags of ids, pooled by hand from rows as FBGEMM's kernels pool them.

Never imports torch: who has the source model computes that one's answers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from embedserve_store.format.manifest import Manifest
from embedserve_store.format.row_layout import dequantize_rows
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.format.tables_file import TablesFile
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.ids.translate import IdTranslator

RowsOf = Callable[[TableSpec, NDArray[np.int64]], NDArray[np.float32]]
"""Gives the float32 rows [n, dim] of a table for row numbers [n]."""


def row_numbers(bags: Bags, translator: IdTranslator) -> NDArray[np.int64]:
    """The row [n] that each id of ``bags`` means."""
    return translator.translate(bags.ids, bags.lengths.sum(axis=1)).rows


def pool(
    manifest: Manifest, bags: Bags, numbers: NDArray[np.int64], rows_of: RowsOf
) -> NDArray[np.float32]:
    """The answers to ``bags``, whose ids mean rows ``numbers``, added one by one in float32.

    A mean divides by the number of ids, also where they have weights, as FBGEMM does. Without
    pooling the rows themselves, [N, dim].
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
    """Rows [n, dim] of bags of ``lengths`` [B] as sums or means [B, dim]."""
    bags = np.split(rows, np.cumsum(lengths)[:-1])
    pooled: NDArray[np.float32] = np.stack([bag.sum(axis=0, dtype=np.float32) for bag in bags])
    if pooling == "mean":
        pooled /= np.maximum(lengths, 1).astype(np.float32)[:, None]
    return pooled


def pool_stored(
    manifest: Manifest, bags: Bags, numbers: NDArray[np.int64], tables: TablesFile
) -> NDArray[np.float32]:
    """The answers from the rows of tables.safetensors; reads those rows only."""

    def rows_of(table: TableSpec, wanted: NDArray[np.int64]) -> NDArray[np.float32]:
        return stored_rows(tables, table, wanted)

    return pool(manifest, bags, numbers, rows_of)


def stored_rows(
    tables: TablesFile, table: TableSpec, numbers: NDArray[np.int64]
) -> NDArray[np.float32]:
    """The values [n, dim] of a table's rows ``numbers``, as a lookup adds them up."""
    return dequantize_rows(tables.rows(table.name)[numbers], table.dtype, table.embedding_dim)
