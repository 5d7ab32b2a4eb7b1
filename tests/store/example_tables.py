"""Tables of every dtype, and bytes for their rows."""

import numpy as np

from embedserve_store.format.table_spec import TableSpec


def spec(name: str, rows: int, dim: int, dtype: str) -> TableSpec:
    return TableSpec(name, rows, dim, (name,), "sum", dtype)


TABLES = (
    spec("odd", 3, 4, "int4"),
    spec("half", 5, 8, "float16"),
    spec("wide", 32, 64, "float32"),
    spec("bytes", 7, 12, "int8"),
)


def content(table: TableSpec) -> np.ndarray:
    seed = sum(table.name.encode())
    shape = (table.num_embeddings, table.row_bytes)
    return np.random.default_rng(seed).integers(0, 120, shape).astype(np.uint8)
