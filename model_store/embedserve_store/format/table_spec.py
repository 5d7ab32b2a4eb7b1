"""Defines a table, and checks that a set of tables is a model that can be served.

Has frozen values, their JSON and their checks. The description of a checkpoint contains tables, the
manifest of a version stores them, and the server shows them. manifest.py defines a whole version.
Never imports torch.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from embedserve_store.errors import StoreError
from embedserve_store.format.id_rule import ROW_NUMBERS, IdRule
from embedserve_store.format.json_fields import typed

DTYPES = ("float32", "float16", "int8", "int4")
CODES_MAX = {"int8": 255, "int4": 15}
"""Largest code of each quantized dtype."""
POOLINGS = ("sum", "mean", "none")
"""Poolings of a table. "none" is that of an EmbeddingCollection, with one row for each id; either
all tables of a model have it, or none."""
SCALE_BIAS_BYTES = 4
"""Bytes of FBGEMM's scale and bias (float16 each), with which int8 and int4 rows begin."""
COLUMN_MULTIPLE = 4
"""Divisor of the number of columns of stored rows, and so of column shards. All of FBGEMM's
quantizers and kernels accept multiples of 4 columns, on CPU and CUDA. Its CPU kernels accept any
number, the others multiples of 1, 2 or 4."""
TABLE_BYTES_MAX = 2**63 - 1

NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


@dataclass(frozen=True)
class TableSpec:
    """An embedding table as stored: a torchrec EmbeddingBagConfig and its row layout."""

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: tuple[str, ...]
    pooling: str
    """Pooling: sum or mean; none for a table of an EmbeddingCollection."""
    dtype: str
    """Stored dtype: float32, float16, int8 or int4."""
    sha256: str = ""
    """Hexadecimal sha256 of the table's bytes in tables.safetensors."""
    ids: IdRule = ROW_NUMBERS
    """Rule by which callers' ids become row numbers."""

    @property
    def stored_dim(self) -> int:
        """Returns the columns of a stored row; columns from embedding_dim onwards are padding."""
        return stored_columns(self.embedding_dim)

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of a stored row: FBGEMM's inference layout of stored_dim columns."""
        return row_bytes(self.dtype, self.stored_dim)

    @property
    def nbytes(self) -> int:
        return self.num_embeddings * self.row_bytes

    def to_json(self) -> dict[str, Any]:
        """Returns the table as the manifest stores it."""
        return vars(self) | {
            "feature_names": list(self.feature_names),
            "row_bytes": self.row_bytes,
            "ids": self.ids.to_json(),
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> TableSpec:
        """Returns the table in ``data`` (parsed JSON).

        Raises:
            StoreError: a field is missing or wrong.
        """
        if not isinstance(data, dict):
            raise StoreError(f"{where}: expected a JSON object")
        ids = IdRule.from_json(typed(data, "ids", dict, where), f"{where}: ids")
        table = table_of(data, ids, where, typed(data, "sha256", str, where))
        if data.get("row_bytes") != table.row_bytes:
            raise StoreError(
                f"{where}: row_bytes is {data.get('row_bytes')!r}, but a {table.dtype} row of "
                f"{table.embedding_dim} dims has {table.row_bytes}"
            )
        return table


def table_of(data: dict[str, Any], ids: IdRule, where: str, sha256: str = "") -> TableSpec:
    """Returns the table in ``data``, which has the same fields in manifests and descriptions.

    Only the id rule differs between the two, so the caller passes it as ``ids``.

    Raises:
        StoreError: a field is missing or has the wrong type, or the table cannot be served.
    """
    features = typed(data, "feature_names", list, where)
    if not all(isinstance(feature, str) for feature in features):
        raise StoreError(f"{where}: feature_names is {features!r}, expected a list of names")
    table = TableSpec(
        name=typed(data, "name", str, where),
        num_embeddings=typed(data, "num_embeddings", int, where),
        embedding_dim=typed(data, "embedding_dim", int, where),
        feature_names=tuple(features),
        pooling=typed(data, "pooling", str, where),
        dtype=typed(data, "dtype", str, where),
        sha256=sha256,
        ids=ids,
    )
    check_table(table, where)
    return table


def stored_columns(columns: int) -> int:
    """Returns the number of stored columns: ``columns`` rounded up to a multiple of 4.

    FBGEMM's kernels require such a multiple.

    >>> stored_columns(10), stored_columns(64)
    (12, 64)
    """
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def row_bytes(dtype: str, columns: int) -> int:
    """Returns the bytes of a row of ``columns`` stored columns.

    The result equals that of fbgemm_gpu's unpadded_row_size_in_bytes.

    >>> row_bytes("float32", 64), row_bytes("int8", 64), row_bytes("int4", 64)
    (256, 68, 36)
    """
    if dtype == "float32":
        return 4 * columns
    if dtype == "float16":
        return 2 * columns
    if dtype == "int8":
        return columns + SCALE_BIAS_BYTES
    if dtype == "int4":
        return (columns + 1) // 2 + SCALE_BIAS_BYTES
    raise ValueError(f"unknown dtype {dtype!r}: expected one of {', '.join(DTYPES)}")


def answer_keys(tables: tuple[TableSpec, ...]) -> tuple[str, ...]:
    """Returns the keys of a response, named as in torchrec's EmbeddingBagCollection.

    A key is the feature, or feature@table if several tables serve that feature.
    """
    uses = Counter(feature for table in tables for feature in table.feature_names)
    return tuple(
        feature if uses[feature] == 1 else f"{feature}@{table.name}"
        for table in tables
        for feature in table.feature_names
    )


def check_model_name(model: str, where: str) -> None:
    """Raises StoreError unless ``model`` can be the name of a model."""
    if not NAME_PATTERN.fullmatch(model):
        raise StoreError(f"{where}: {model!r} is not the name of a model")


def check_table(table: TableSpec, where: str) -> None:
    """Raises StoreError unless ``table`` can be stored and served."""
    if not NAME_PATTERN.fullmatch(table.name):
        raise StoreError(
            f"{where}: table name {table.name!r}: use letters, digits, '_' and '-', "
            "and begin with a letter, digit or '_'"
        )
    if table.name == "__metadata__":
        raise StoreError(f"{where}: table name '__metadata__' has a meaning in safetensors files")
    if table.num_embeddings < 1:
        raise StoreError(f"{where}: num_embeddings is {table.num_embeddings}, expected 1 or more")
    if table.embedding_dim < 1:
        raise StoreError(f"{where}: embedding_dim is {table.embedding_dim}, expected 1 or more")
    if table.num_embeddings * table.stored_dim * 4 > TABLE_BYTES_MAX:
        raise StoreError(
            f"{where}: num_embeddings is {table.num_embeddings}: its float32 rows would have more "
            f"than {TABLE_BYTES_MAX} bytes"
        )
    if table.dtype not in DTYPES:
        raise StoreError(f"{where}: dtype is {table.dtype!r}, expected one of {', '.join(DTYPES)}")
    if table.pooling not in POOLINGS:
        raise StoreError(f"{where}: pooling is {table.pooling!r}, expected sum, mean or none")
    table.ids.check(table.num_embeddings, f"{where}: ids")
    if not table.feature_names or not all(table.feature_names):
        raise StoreError(f"{where}: feature_names is {list(table.feature_names)}: name a feature")
    for feature in table.feature_names:
        if any("\ud800" <= letter <= "\udfff" for letter in feature):
            raise StoreError(
                f"{where}: feature_names: {feature!r} is no text: half of a surrogate pair"
            )
    if len(set(table.feature_names)) < len(table.feature_names):
        raise StoreError(f"{where}: feature_names {list(table.feature_names)} has one twice")


def check_tables(tables: tuple[TableSpec, ...], where: str) -> None:
    """Raises StoreError unless ``tables`` are a model that can be served.

    There must be a table, and names and keys must be unique. Unpooled tables must have equal dims
    and no pooled tables beside them, and tables that share a feature must have the same id rule.
    """
    if not tables:
        raise StoreError(f"{where}: no tables")
    for name, count in Counter(table.name for table in tables).items():
        if count > 1:
            raise StoreError(f"{where}: {count} tables are named {name!r}")
    for key, count in Counter(answer_keys(tables)).items():
        if count > 1:
            raise StoreError(f"{where}: {count} answers are called {key!r}: rename a feature")
    _check_unpooled(tables, where)
    _check_shared_rules(tables, where)


def check_weighted(tables: tuple[TableSpec, ...], is_weighted: bool, where: str) -> None:
    """Raises StoreError if a model with weights is not pooled."""
    if is_weighted and tables[0].pooling == "none":
        raise StoreError(f"{where}: is_weighted, but rows that are not pooled have no weights")


def _check_unpooled(tables: tuple[TableSpec, ...], where: str) -> None:
    unpooled = [table for table in tables if table.pooling == "none"]
    if not unpooled:
        return
    first = unpooled[0]
    for table in tables:
        if table.pooling != "none":
            raise StoreError(
                f"{where}: table {first.name!r} is not pooled and {table.name!r} is: "
                "publish an EmbeddingCollection and an EmbeddingBagCollection as two models"
            )
        if table.embedding_dim != first.embedding_dim:
            raise StoreError(
                f"{where}: tables {first.name!r} and {table.name!r} have {first.embedding_dim} "
                f"and {table.embedding_dim} dims: those of an EmbeddingCollection have one"
            )


def _check_shared_rules(tables: tuple[TableSpec, ...], where: str) -> None:
    owner: dict[str, TableSpec] = {}
    for table in tables:
        for feature in table.feature_names:
            first = owner.setdefault(feature, table)
            if first.ids != table.ids:
                raise StoreError(
                    f"{where}: feature {feature!r} serves tables {first.name!r} and "
                    f"{table.name!r}, which turn ids into rows by different rules"
                )
