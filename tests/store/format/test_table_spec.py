"""Tests of a table's description: bytes per row as in FBGEMM, and tables that cannot be served."""

import json
from dataclasses import replace
from typing import Any

import pytest
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import unpadded_row_size_in_bytes

from embedserve_store.errors import StoreError
from embedserve_store.format.table_spec import TableSpec, check_table, row_bytes

TABLE = TableSpec("a", 100, 8, ("x", "y"), "sum", "int8", "00")


@pytest.mark.parametrize("dim", [4, 12, 64, 132])
@pytest.mark.parametrize(
    ("dtype", "sparse"),
    [("float32", "FP32"), ("float16", "FP16"), ("int8", "INT8"), ("int4", "INT4")],
)
def test_row_bytes_match_fbgemm(dim: int, dtype: str, sparse: str) -> None:
    assert row_bytes(dtype, dim) == unpadded_row_size_in_bytes(dim, SparseType[sparse])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a b"}, "table name 'a b'"),
        ({"name": "__metadata__"}, "has a meaning in safetensors files"),
        ({"num_embeddings": 0}, "num_embeddings is 0"),
        ({"embedding_dim": 0}, "embedding_dim is 0"),
        ({"dtype": "bf16"}, "dtype is 'bf16'"),
        ({"pooling": "max"}, "pooling is 'max'"),
        ({"feature_names": ("x", "")}, "name a feature"),
        ({"feature_names": ("x", "x")}, "has one twice"),
        ({"feature_names": ("x", "\ud800")}, "'\\\\ud800' is no text: half of a surrogate pair"),
    ],
)
def test_invalid_tables_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StoreError, match=f"here: .*{message}"):
        check_table(replace(TABLE, **change), "here")


def test_json_round_trip() -> None:
    data = json.loads(json.dumps(TABLE.to_json()))
    assert (data["row_bytes"], data["ids"]) == (12, {"rule": "rows", "unknown": "error"})
    assert TableSpec.from_json(data, "here") == TABLE
