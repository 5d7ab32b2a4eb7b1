"""Reads vocabulary files: the ids of a table, raw int64 or strings, and the row of each id.

.npy, .txt and a .json list have the ids in the order of the rows. .csv (header id,row) and a .json
object have the row of each id. Every entry is checked. The result is two arrays, in which strings
are replaced by their hashes. A .npy file is mapped, and .txt and .csv are read line by line. They
need 16 bytes of memory per id, and briefly twice as much. .json is parsed whole. Never unpickles,
never imports torch.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError, reading
from embedserve_store.ids.id_index import find_duplicate
from embedserve_store.ids.string_hashes import hash_strings

_BLOCK_IDS = 1 << 16
_QUOTED_MAX = 80
_INTEGER = re.compile(r"[+-]?[0-9]+")
_INT64 = np.iinfo(np.int64)

_Entry = tuple[int, Any, Any]
"""Entry of a file: line number or position, id, and row or _NEXT."""
_NEXT = object()
"""Marks an entry without a row of its own: its position in the file is its row."""
_Ids = NDArray[np.int64]


@dataclass(frozen=True)
class _File:
    """A vocabulary file, with the properties of its table that entries are checked against."""

    path: Path
    id_type: str
    num_embeddings: int
    table: str

    def entries(self) -> Iterator[_Entry]:
        return _ENTRIES[self.path.suffix](self.path)

    def reject(self, problem: str, number: int | None = None) -> NoReturn:
        """Raises InvalidModelError; the message names line or entry ``number`` if given."""
        counted = "entry" if self.path.suffix in (".npy", ".json") else "line"
        where = "" if number is None else f"{counted} {number}: "
        raise InvalidModelError(f"table {self.table!r}: {self.path}: {where}{problem}")


def read_vocabulary(
    path: Path, id_type: str, num_embeddings: int, table: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Reads ``path``, and returns the ids [n] of ``table`` and their rows [n].

    Args:
        id_type: int64 or string; strings are returned as their hashes.
        num_embeddings: number of rows of the table.

    Raises:
        InvalidModelError: an id is not an integer, is outside int64 or occurs twice. Or a row is
            outside the table, there are more ids than rows, or the format is wrong. The message
            names the file, line, value and table.
        StoreError: the file cannot be read.
    """
    file = _File(path, id_type, num_embeddings, table)
    if path.suffix != ".npy" and path.suffix not in _ENTRIES:
        file.reject("expected .npy, .txt, .csv or .json")
    try:
        with reading(f"table {table!r}: {path}"):
            return _read_npy(file) if path.suffix == ".npy" else _read_entries(file)
    except (ValueError, csv.Error, RecursionError) as error:
        problem = f"not a vocabulary in {path.suffix.removeprefix('.')}: {error}"
        raise InvalidModelError(f"table {table!r}: {path}: {problem}") from error


def first_strings(path: Path, count: int) -> tuple[str, ...]:
    """Returns the first strings of ``path``, at most ``count``.

    read_vocabulary must have accepted the file before.
    """
    return tuple(one for _, one, _ in islice(_ENTRIES[path.suffix](path), count))


def _read_npy(file: _File) -> tuple[_Ids, _Ids]:
    # open_memmap rejects arrays of objects, which would be pickled.
    ids = np.asarray(np.lib.format.open_memmap(file.path, mode="r"))
    if file.id_type != "int64":
        file.reject("holds no strings: write them as .txt, .csv or .json")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        file.reject(f"holds {ids.dtype} {list(ids.shape)}, expected int64 [ids]")
    if len(ids) > file.num_embeddings:
        file.reject(f"holds {len(ids)} ids, the table has {file.num_embeddings} rows")
    if ids.dtype == np.uint64 and ids.size and ids.max() > _INT64.max:
        position = int(ids.argmax())
        file.reject(f"{ids[position]} is outside int64", position)
    ids = ids.astype(np.int64, copy=False)
    duplicate = find_duplicate(ids)
    if duplicate:
        first, second = sorted(duplicate)
        file.reject(f"id {ids[first]} is there twice, first as entry {first}", second)
    return ids, np.arange(len(ids))


def _read_entries(file: _File) -> tuple[_Ids, _Ids]:
    ids: list[_Ids] = [np.zeros(0, np.int64)]
    rows: list[_Ids] = [np.zeros(0, np.int64)]
    entries = file.entries()
    count = 0
    while block := list(islice(entries, _BLOCK_IDS)):
        rows.append(_rows(block, count, file))
        ids.append(_ids(block, file))
        count += len(block)
    joined = np.concatenate(ids)
    duplicate = find_duplicate(joined)
    if duplicate:
        _refuse_duplicate(file, *sorted(duplicate))
    return joined, np.concatenate(rows)


def _ids(block: list[_Entry], file: _File) -> _Ids:
    if file.id_type == "int64":
        hint = "; ids that are text need `id_type: string`"
        return np.array([_integer(one, number, file, hint) for number, one, _ in block], np.int64)
    for number, one, _ in block:
        if not isinstance(one, str):
            file.reject(f"{_quote(one)} is not a string", number)
    return hash_strings([one for _, one, _ in block], f"table {file.table!r}: {file.path}")


def _integer(value: Any, number: int, file: _File, hint: str = "") -> int:
    """Returns ``value``, an int or a decimal string, as an int; rejects values outside int64, and
    other strings with ``hint``."""
    if isinstance(value, str):
        text = value.strip()
        is_integer = _INTEGER.fullmatch(text) is not None
        # Python does not parse thousands of digits; 10**19 stands for any value outside int64.
        result = (int(text) if len(text) < _QUOTED_MAX else 10**19) if is_integer else 0
    else:
        is_integer = type(value) is int
        result = value
    if not is_integer:
        hint = hint if isinstance(value, str) else ""
        file.reject(f"{_quote(value)} is not an integer{hint}", number)
    if not _INT64.min <= result <= _INT64.max:
        file.reject(f"{_quote(value)} is outside int64", number)
    return int(result)


def _rows(block: list[_Entry], count: int, file: _File) -> _Ids:
    """Returns the rows of ``block``, which follows ``count`` earlier entries."""
    limit = file.num_embeddings
    if block[0][2] is _NEXT:
        if count + len(block) > limit:
            file.reject(f"more ids than the table's {limit} rows", block[limit - count][0])
        return np.arange(count, count + len(block))
    rows = np.array([_integer(row, number, file) for number, _, row in block], np.int64)
    outside = (rows < 0) | (rows >= limit)
    if outside.any():
        number, _, row = block[int(outside.argmax())]
        file.reject(f"row {row} is not one of the table's 0 to {limit - 1}", number)
    return rows


def _refuse_duplicate(file: _File, first: int, second: int) -> NoReturn:
    """Raises InvalidModelError for the equal entries at positions ``first`` and ``second``.

    Reads the file again to quote both, because strings are not kept.
    """
    number, one, _ = next(islice(file.entries(), first, None))
    other_number, other, _ = next(islice(file.entries(), second, None))
    if file.id_type == "string" and one != other:
        file.reject(
            f"{_quote(other)} has the 64-bit hash of {_quote(one)} at {number}: rename one",
            other_number,
        )
    file.reject(f"id {_quote(other)} is there twice, first at {number}", other_number)


def _quote(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _QUOTED_MAX else f"{text[:_QUOTED_MAX]}…"


def _lines(path: Path) -> Iterator[_Entry]:
    with open(path, encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            yield number, line.removesuffix("\n").removesuffix("\r"), _NEXT


def _csv_rows(path: Path) -> Iterator[_Entry]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        header = next(reader, [])
        if header != ["id", "row"]:
            raise ValueError(f"line 1 is {_quote(','.join(header))}, expected id,row")
        for values in reader:
            if len(values) != 2:
                raise ValueError(f"line {reader.line_num} has {len(values)} columns, expected 2")
            yield reader.line_num, values[0], values[1]


def _json_entries(path: Path) -> Iterator[_Entry]:
    # Objects are parsed as tuples of pairs, because a dict would keep only the last of equal ids.
    data = json.loads(path.read_text("utf-8-sig"), object_pairs_hook=tuple)
    if not isinstance(data, (list, tuple)):
        raise ValueError("expected a list of ids, or an object of rows by id")
    for position, entry in enumerate(data):
        yield (position, entry, _NEXT) if isinstance(data, list) else (position, *entry)


_ENTRIES: dict[str, Callable[[Path], Iterator[_Entry]]] = {
    ".txt": _lines,
    ".csv": _csv_rows,
    ".json": _json_entries,
}
