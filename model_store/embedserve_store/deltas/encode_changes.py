"""Checks the rows that a training job pushes, and encodes them as stored.

Imports torch when called.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.delta_file import ChangedRows, check_rows, repeated_row
from embedserve_store.format.row_layout import encode_rows
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.ids.id_map import IdMap
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


def encode_changes(
    changes: Changes, tables: Mapping[str, TableSpec], id_maps: Mapping[str, IdMap]
) -> dict[str, ChangedRows]:
    """Returns the changed rows of each table, encoded in its dtype, with row numbers ascending.

    Args:
        changes: row numbers and rows by table. For a table with an id map, ids of its vocabulary
            replace the row numbers.
        tables: tables of the version, by name.

    Raises:
        InvalidModelError: names the table, and the id or row that cannot be stored.
    """
    encoded = {
        name: _encode(_table(tables, name), ids, rows, id_maps.get(name))
        for name, (ids, rows) in changes.items()
    }
    return {name: change for name, change in encoded.items() if len(change.numbers)}


def copy_changes(changes: Changes) -> dict[str, tuple[Ids, Rows]]:
    """Returns copies of ids and rows on the CPU, which the caller may change meanwhile."""
    return {name: (copy_values(ids), copy_values(rows)) for name, (ids, rows) in changes.items()}


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


def _encode(table: TableSpec, ids: Ids, rows: Rows, id_map: IdMap | None) -> ChangedRows:
    block = _block(table, rows)
    numbers = _numbers(table, ids) if id_map is None else _mapped(table, ids, id_map)
    if len(numbers) != len(block):
        raise InvalidModelError(f"table {table.name!r}: {len(numbers)} ids for {len(block)} rows")
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    if (row := repeated_row(numbers)) is not None:
        raise InvalidModelError(f"table {table.name!r}: row {row} is pushed twice")
    if str(block.dtype) == "torch.bfloat16":
        block = block.float()
    values = encode_rows(block[order], table.dtype)
    try:
        check_rows(table, numbers, values, "changes")
    except StoreError as error:
        raise InvalidModelError(str(error)) from error
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


def _mapped(table: TableSpec, ids: Ids, id_map: IdMap) -> NDArray[np.int64]:
    """Returns the rows of the vocabulary's ``ids``."""
    is_string = table.ids.id_type == "string"
    keys = hash_strings(_strings(table, ids)) if is_string else _numbers(table, ids)
    numbers = id_map.rows_of(keys)
    unknown = np.flatnonzero(numbers < 0)
    if len(unknown):
        at = int(unknown[0])
        one = ids[at] if is_string else int(keys[at])
        raise InvalidModelError(
            f"table {table.name!r}: id {one!r:.80} is not in the vocabulary: new ids need a new "
            "version"
        )
    return numbers


def _strings(table: TableSpec, ids: Ids) -> Sequence[str]:
    for one in ids:
        if not isinstance(one, str):
            raise InvalidModelError(f"table {table.name!r}: id {one!r:.80} is not a string")
    return [str(one) for one in ids]


def _array(ids: Ids) -> NDArray[Any]:
    return np.asarray(ids.cpu() if hasattr(ids, "cpu") else ids)
