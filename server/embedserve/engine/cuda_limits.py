"""Checks for tables that FBGEMM's CUDA kernels cannot serve, though its CPU kernels can. Errors
name the table.

The limits come from FBGEMM's sources. No function here uses a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import StoreError
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import CODES_MAX, SCALE_BIAS_BYTES, TableSpec
from embedserve_store.plans.plan import Plan

ROWS_MAX = 2**31 - 1
"""Rows that a table may have on CUDA, where torchrec casts ids to int32."""
COLUMNS_MAX = {"float32": 2048, "float16": 4096, "int8": 4092, "int4": 4088}
"""Columns that a shard may have on CUDA, by dtype. Rows may have at most 8 KiB of floats, 4 KiB of
int8 or 2 KiB of int4, including scale and bias. FBGEMM checks this in
embedding_forward_quantized_split_nbit_host_template.cu."""
SCALE_FACTOR = 512
"""Factor by which the CUDA kernels multiply a row's scale in float16 (FBGEMM's vecn.cuh)."""
HALF_MAX = float(np.finfo(np.float16).max)


def check_fits_cuda(manifest: Manifest, plan: Plan) -> None:
    """Raises StoreError for tables with more rows than ids can address on CUDA, and for tables that
    the constraints of ``plan`` keep off GPUs."""
    for name, constraints in plan.constraints.items():
        constraints.check_on_gpu(f"table {name!r}")
    for table in manifest.tables:
        if table.num_embeddings > ROWS_MAX:
            raise StoreError(
                f"table {table.name!r} has {table.num_embeddings} rows: on CUDA torchrec casts "
                f"ids to int32, so tables have at most {ROWS_MAX} rows; serve it on the CPU"
            )


def check_columns(manifest: Manifest, plan: Plan) -> None:
    """Raises StoreError if ``plan`` has shards too wide for the CUDA kernels."""
    for table in manifest.tables:
        columns = max(shard.stored_col_count for shard in plan.tables[table.name].served_shards)
        most = COLUMNS_MAX[table.dtype]
        if columns > most:
            raise StoreError(
                f"table {table.name!r} has {columns} columns on a GPU: FBGEMM's CUDA kernels serve "
                f"{most} of {table.dtype} at most; divide it by columns over more ranks, or serve "
                "it on the CPU"
            )


def check_half_range(
    heads: NDArray[np.uint8], table: TableSpec, rows: Sequence[int] | NDArray[np.int64]
) -> None:
    """Raises StoreError for an int8 or int4 row that the CUDA kernels would make infinite. They
    multiply its scale, and compute its values, in float16.

    Args:
        heads: uint8 [n, 4], the scale and bias of each row.
        rows: number of each row in ``table``.
    """
    pairs = np.ascontiguousarray(heads).view("<f2").astype(np.float32)
    scale, bias = pairs[:, 0], pairs[:, 1]
    largest = np.maximum(np.abs(bias), np.abs(bias + scale * CODES_MAX[table.dtype]))
    wrong = np.flatnonzero((scale * SCALE_FACTOR > HALF_MAX) | (largest > HALF_MAX))
    if wrong.size:
        row = int(wrong[0])
        raise StoreError(
            f"table {table.name!r}: row {rows[row]} has the scale {scale[row]:g} and the "
            f"bias {bias[row]:g}: FBGEMM's CUDA kernels dequantize {table.dtype} in float16, where "
            f"{SCALE_FACTOR} times the scale and every value is {HALF_MAX:g} at most; publish it "
            "as float32, or serve it on the CPU"
        )


def check_changed_rows(changed: ChangedRows) -> None:
    """Raises StoreError for rows of a delta that GPUs cannot serve."""
    if changed.table.dtype in CODES_MAX:
        heads = changed.values[:, :SCALE_BIAS_BYTES]
        check_half_range(heads, changed.table, changed.numbers)
