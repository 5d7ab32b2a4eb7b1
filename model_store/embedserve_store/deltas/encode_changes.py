"""Checks the rows that a training job pushes, and encodes them as stored.

Imports torch when called.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError, checking_model
from embedserve_store.format.delta_file import ChangedRows, check_rows, repeated_row
from embedserve_store.format.row_layout import encode_rows
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.ids.string_hashes import hash_strings
from embedserve_store.sources.rows import SOURCE_DTYPES

if TYPE_CHECKING:
    import torch

Rows = Any
"""Rows [n, dim] of float32, float16 or bfloat16: a numpy array, or a tensor on any device."""
Ids = Any
"""Row numbers or ids [n]: an array or tensor of integers, or a sequence of int or str."""
Changes = Mapping[str, tuple[Ids, Rows]]
"""Row numbers or ids, and rows, by table."""
HashedChanges = Mapping[str, tuple[NDArray[np.int64], Rows]]
"""Changes whose ids are int64 [n]: strings are their hashes."""
RowsOfIds = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Returns the rows [n] of ids [n]; -1 for an id without a row."""


def hash_changes(changes: Changes, tables: Mapping[str, TableSpec]) -> HashedChanges:
    """Returns ``changes`` with ids as they are looked up.

    Args:
        tables: tables of the version, by name.

    Raises:
        InvalidModelError: a table is not in the model, its ids have another type, or ``changes``
            are not ids and rows by table.
    """
    return {
        name: (hash_ids(_table(tables, name), ids), rows)
        for name, (ids, rows) in _pairs_by_table(changes)
    }


def hash_ids(table: TableSpec, ids: Ids) -> NDArray[np.int64]:
    """Returns row numbers or ids as int64 [n]; strings become their hashes.

    Raises:
        InvalidModelError: the ids are not those of the table's type.
    """
    if table.ids.rule == "map" and table.ids.id_type == "string":
        return hash_strings(_strings(table, ids), f"table {table.name!r}: ids")
    return _numbers(table, ids)


def encode_changes(
    changes: HashedChanges, tables: Mapping[str, TableSpec], rows_of: Mapping[str, RowsOfIds]
) -> dict[str, ChangedRows]:
    """Returns the changed rows of each table, encoded in its dtype, with row numbers ascending.

    Args:
        changes: row numbers and rows by table. For a table in ``rows_of``, ids of its vocabulary
            replace the row numbers.
        tables: tables of the version, by name.
        rows_of: functions that return the rows of ids, by table.

    Raises:
        InvalidModelError: names the table, and the id or row that cannot be stored.
    """
    encoded = {
        name: _encode(tables[name], ids, rows, rows_of.get(name))
        for name, (ids, rows) in changes.items()
    }
    return {name: change for name, change in encoded.items() if len(change.numbers)}


def copy_changes(changes: Changes) -> dict[str, tuple[Ids, Rows]]:
    """Returns copies of ids and rows on the CPU, which the caller may change meanwhile. Raises
    InvalidModelError if ``changes`` are something else."""
    return {
        name: (copy_values(ids), copy_values(rows))
        for name, (ids, rows) in _pairs_by_table(changes)
    }


def copy_removed(ids: Mapping[str, Ids] | None) -> dict[str, Ids]:
    """Returns copies of ids by table on the CPU. Raises InvalidModelError if ``ids`` are something
    else."""
    by_table = {} if ids is None else _check_by_table(ids, "removed", "ids")
    return {name: copy_values(one) for name, one in by_table.items()}


def _pairs_by_table(changes: Changes) -> Iterator[tuple[str, tuple[Ids, Rows]]]:
    for name, values in _check_by_table(changes, "changes", "(ids, rows)").items():
        yield name, check_pair(values, f"table {name!r}: changes", "(ids, rows)")


def _check_by_table(values: Mapping[str, Any], name: str, expected: str) -> Mapping[str, Any]:
    """Returns ``values``. Raises InvalidModelError if they have no table names."""
    if not isinstance(values, Mapping):
        raise InvalidModelError(
            f"{name} are of type {type(values).__name__}, expected a dict of {expected} by table"
        )
    return values


def check_pair(values: tuple[Any, Any], name: str, expected: str) -> tuple[Any, Any]:
    """Returns ``values``. Raises InvalidModelError if they are not two."""
    if not isinstance(values, tuple | list) or len(values) != 2:
        raise InvalidModelError(f"{name} are of type {type(values).__name__}, expected {expected}")
    return values[0], values[1]


def copy_values(values: Any) -> Any:
    """Returns a copy of an array or sequence, and of a tensor one on the CPU."""
    if hasattr(values, "detach"):
        return values.detach().to("cpu", copy=True)
    return copy.deepcopy(values)


def _table(tables: Mapping[str, TableSpec], name: str) -> TableSpec:
    if name not in tables:
        raise InvalidModelError(
            f"table {name!r} is not in the model; tables are {', '.join(tables)}"
        )
    return tables[name]


def _encode(
    table: TableSpec, ids: NDArray[np.int64], rows: Rows, rows_of: RowsOfIds | None
) -> ChangedRows:
    block = _block(table, rows)
    numbers = ids if rows_of is None else _mapped(table, ids, rows_of)
    if len(numbers) != len(block):
        raise InvalidModelError(f"table {table.name!r}: {len(numbers)} ids for {len(block)} rows")
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    if (row := repeated_row(numbers)) is not None:
        raise InvalidModelError(f"table {table.name!r}: row {row} is pushed twice")
    if str(block.dtype) == "torch.bfloat16":
        block = block.float()
    values = encode_rows(block[order], table.dtype)
    with checking_model():
        check_rows(table, numbers, values, "changes")
    return ChangedRows(table, numbers, values)


def _block(table: TableSpec, rows: Rows) -> torch.Tensor:
    import torch

    block = torch.as_tensor(rows).detach().cpu()
    dtype = str(block.dtype).removeprefix("torch.")
    if block.ndim != 2 or block.shape[1] != table.embedding_dim or dtype not in SOURCE_DTYPES:
        raise InvalidModelError(
            f"table {table.name!r}: rows are {dtype} {list(block.shape)}, expected "
            f"[n, {table.embedding_dim}] of {', '.join(SOURCE_DTYPES)}"
        )
    return block


def _numbers(table: TableSpec, ids: Ids) -> NDArray[np.int64]:
    array = _array(ids)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InvalidModelError(
            f"table {table.name!r}: ids are {array.dtype} {list(array.shape)}, expected row "
            "numbers, integers [n]"
        )
    if array.dtype == np.uint64 and array.size and array.max() >= 1 << 63:
        raise InvalidModelError(f"table {table.name!r}: id {array.max()} is no row number")
    return array.astype(np.int64)


def _mapped(table: TableSpec, ids: NDArray[np.int64], rows_of: RowsOfIds) -> NDArray[np.int64]:
    numbers = rows_of(ids)
    if (numbers < 0).any():  # each new id has got a row
        one = ids[(numbers < 0).argmax()]
        raise InvalidModelError(
            f"table {table.name!r}: id {one} is pushed, and removed by another rank"
        )
    return numbers


def _strings(table: TableSpec, ids: Ids) -> Sequence[str]:
    for one in ids:
        if not isinstance(one, str):
            raise InvalidModelError(f"table {table.name!r}: id {one!r:.80} is not a string")
    return [str(one) for one in ids]


def _array(ids: Ids) -> NDArray[Any]:
    return np.asarray(ids.cpu() if hasattr(ids, "cpu") else ids)
