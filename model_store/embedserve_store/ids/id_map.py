"""Id maps: the vocabularies of tables, from raw int64 ids to rows, stored in ids.safetensors.

Publishing builds the maps in memory and writes the maps of all tables to ids.safetensors. A server
maps the file read-only: opening reads only its header. String ids are hashed before they reach this
module. Never imports torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.format.manifest_checksum import check_sha256
from embedserve_store.format.safetensors_file import (
    consecutive,
    data_bytes,
    encode_header,
    map_tensors,
)
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.ids.id_index import WINDOW, IdIndex, bucket_count, build_index

_PARTS = {"ids": "I64", "rows": "U32", "starts": "U32"}
"""Dtype of each tensor of a map, in the order of the file. The file has the ids of all tables, then
all rows, then all starts."""


@dataclass(frozen=True, eq=False)
class IdMap:
    """Id map of a table: its entries in an index, which other tables may share."""

    index: IdIndex
    entries: int
    first_bucket: int = 0
    first_slot: int = 0

    @classmethod
    def build(cls, ids: NDArray[np.int64], rows: NDArray[np.int64], table: str) -> IdMap:
        """Builds the map from ``ids`` [n] to ``rows`` [n].

        Any int64 is a valid id. Ids may share a row, and rows may have no id. Building needs 32
        bytes per entry in addition to the arguments, and the map keeps 15.5.

        Raises:
            InvalidModelError: an id occurs twice, or there are too many entries or rows.
        """
        ids = np.ascontiguousarray(ids, np.int64)
        return cls(build_index(ids, np.asarray(rows, np.int64), f"table {table!r}"), len(ids))

    @property
    def buckets(self) -> int:
        return bucket_count(self.entries)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Returns the ids [entries], in the order of their hashes."""
        return self.index.ids[self.first_slot : self.first_slot + self.entries]

    @property
    def rows(self) -> NDArray[np.uint32]:
        """Returns the rows [entries] of ``ids``."""
        return self.index.rows[self.first_slot : self.first_slot + self.entries]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts().values())

    def __len__(self) -> int:
        return self.entries

    def __eq__(self, other: object) -> bool:
        """Returns whether both maps have the same ids with the same rows."""
        if not isinstance(other, IdMap):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.rows, other.rows)

    __hash__ = None  # type: ignore[assignment]

    def rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the rows [n] of ``ids`` [n]; -1 for an id that the map does not have."""
        return self.index.rows_of(ids, self.first_bucket, self.buckets, self.first_slot)

    def sample(
        self, random: np.random.Generator, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draws ids [count] with replacement, and returns them with their rows [count].

        Reads only these entries. The map must have an entry, unless ``count`` is 0.
        """
        drawn = random.integers(0, max(self.entries, 1), count)
        return self.ids[drawn], self.rows[drawn].astype(np.int64)

    def parts(self) -> dict[str, NDArray[Any]]:
        """Returns the stored arrays: ids and rows with the unused slots behind them, and starts."""
        slots = slice(self.first_slot, self.first_slot + self.entries + WINDOW)
        buckets = slice(self.first_bucket, self.first_bucket + self.buckets + 1)
        index = self.index
        return {"ids": index.ids[slots], "rows": index.rows[slots], "starts": index.starts[buckets]}

    def sha256(self) -> str:
        """Returns the hexadecimal sha256 of the stored arrays; reads the whole map."""
        digest = hashlib.sha256()
        for part in self.parts().values():
            digest.update(part.data)
        return digest.hexdigest()


def write_id_maps(path: Path, maps: Mapping[str, IdMap]) -> dict[str, str]:
    """Writes ``maps`` (by table) to a new file at ``path`` and syncs it; returns their sha256.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    with open(path, "xb") as file:
        file.write(encode_header(tensors_of({name: len(one) for name, one in maps.items()})))
        for part in _PARTS:
            for one in maps.values():
                file.write(one.parts()[part].data)
        file.flush()
        os.fsync(file.fileno())
    return {name: one.sha256() for name, one in maps.items()}


def tensors_of(entries: Mapping[str, int]) -> dict[str, Any]:
    """Returns the header of ids.safetensors for maps with these numbers of entries, by table."""
    return consecutive(
        (
            f"{name}.{part}",
            dtype,
            [bucket_count(count) + 1 if part == "starts" else count + WINDOW],
        )
        for part, dtype in _PARTS.items()
        for name, count in entries.items()
    )


def ids_file_bytes(entries: Mapping[str, int]) -> int:
    """Returns the bytes of ids.safetensors for maps with these numbers of entries, by table; 0
    without maps, which need no file."""
    tensors = tensors_of(entries)
    return len(encode_header(tensors)) + data_bytes(tensors) if tensors else 0


def open_id_maps(path: Path, tables: tuple[TableSpec, ...]) -> dict[str, IdMap]:
    """Maps ``path``, which has the id maps of the ``tables`` with the rule map, in order.

    Returns them by table; without such a table opens nothing. All maps share an index, so that a
    single lookup can serve the ids of all tables.

    Raises:
        StoreError: the file is missing or truncated, or does not match ``tables``.
    """
    entries = {table.name: table.ids.entries for table in tables if table.ids.rule == "map"}
    if not entries:
        return {}
    data = map_tensors(path, tensors_of(entries))
    index = _index(data, sum(entries.values()) + WINDOW * len(entries))
    return dict(zip(entries, _split(index, entries), strict=True))


def check_id_maps(maps: Mapping[str, IdMap], tables: tuple[TableSpec, ...], path: Path) -> None:
    """Reads ``maps``, those of ``path``, and raises StoreError if a byte has changed since
    publishing. The message names the table."""
    for table in tables:
        if table.name in maps:
            found = maps[table.name].sha256()
            check_sha256(found, table.ids.sha256, f"{path}: table {table.name!r}")


def _index(data: NDArray[np.uint8], slots: int) -> IdIndex:
    """Returns the index of all tables over the file's data, which has all ids, rows and starts."""
    ids_end = 8 * slots
    rows_end = ids_end + 4 * slots
    return IdIndex(
        ids=data[:ids_end].view(np.int64),
        rows=data[ids_end:rows_end].view(np.uint32),
        starts=data[rows_end:].view(np.uint32),
    )


def _split(index: IdIndex, entries: Mapping[str, int]) -> Iterator[IdMap]:
    first_bucket = first_slot = 0
    for count in entries.values():
        yield IdMap(index, count, first_bucket, first_slot)
        first_bucket += bucket_count(count) + 1
        first_slot += count + WINDOW
