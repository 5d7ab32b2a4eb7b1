"""A table's vocabulary, raw int64 ids and the rows that they stand for, and ids.safetensors.

A map is built in memory at publish, written to ids.safetensors with those of the other tables,
and mapped read-only where it is served: opening reads nothing but the file's header. Ids that
are strings come here as their hashes. Never imports torch.
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

from embedserve_store.errors import StoreError
from embedserve_store.format.safetensors_file import encode_header, map_tensors
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.ids.id_index import WINDOW, IdIndex, bucket_count, build_index

_PARTS = {"ids": ("I64", 8), "rows": ("U32", 4), "starts": ("U32", 4)}
"""The tensors of a map: dtype and bytes of an element, all tables' ids before all rows."""


@dataclass(frozen=True, eq=False)
class IdMap:
    """The ids of one table: its entries in an index, which may hold other tables' too."""

    index: IdIndex
    entries: int
    first_bucket: int = 0
    first_slot: int = 0

    @classmethod
    def build(cls, ids: NDArray[np.int64], rows: NDArray[np.int64], table: str) -> IdMap:
        """The map of ``ids`` [n] to ``rows`` [n]: any int64 is an id, ids may share a row, and
        rows may lack one. It needs 32 bytes an entry besides these, and keeps 15.5.

        Raises:
            InvalidModelError: an id is there twice, or there are too many entries or rows.
        """
        ids = np.ascontiguousarray(ids, np.int64)
        return cls(build_index(ids, np.asarray(rows, np.int64), f"table {table!r}"), len(ids))

    @property
    def buckets(self) -> int:
        return bucket_count(self.entries)

    @property
    def ids(self) -> NDArray[np.int64]:
        """[entries], in the order of their hashes."""
        return self.index.ids[self.first_slot : self.first_slot + self.entries]

    @property
    def rows(self) -> NDArray[np.uint32]:
        """[entries], of ``ids``."""
        return self.index.rows[self.first_slot : self.first_slot + self.entries]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts().values())

    def __len__(self) -> int:
        return self.entries

    def __eq__(self, other: object) -> bool:
        """Whether both have the same rows for the same ids."""
        if not isinstance(other, IdMap):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.rows, other.rows)

    __hash__ = None  # type: ignore[assignment]

    def rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows [n] of ``ids`` [n]; -1 where the map has no such id."""
        return self.index.rows_of(ids, self.first_bucket, self.buckets, self.first_slot)

    def sample(
        self, random: np.random.Generator, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids [count] and their rows [count], drawn with replacement without reading the rest.

        The map must have an entry, unless ``count`` is 0.
        """
        drawn = random.integers(0, max(self.entries, 1), count)
        return self.ids[drawn], self.rows[drawn].astype(np.int64)

    def parts(self) -> dict[str, NDArray[Any]]:
        """What is stored: ids and rows with the unused slots that follow them, and starts."""
        slots = slice(self.first_slot, self.first_slot + self.entries + WINDOW)
        buckets = slice(self.first_bucket, self.first_bucket + self.buckets + 1)
        index = self.index
        return {"ids": index.ids[slots], "rows": index.rows[slots], "starts": index.starts[buckets]}

    def sha256(self) -> str:
        """Of the bytes of all parts, hexadecimal; reads the whole map."""
        digest = hashlib.sha256()
        for part in self.parts().values():
            digest.update(part.data)
        return digest.hexdigest()


def write_id_maps(path: Path, maps: Mapping[str, IdMap]) -> dict[str, str]:
    """Writes the maps of ``maps`` (by table) to ``path``, synced; returns each map's sha256.

    Raises:
        OSError: as the file system says, for instance when the disk is full.
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
    """The header of ids.safetensors for maps of so many ``entries``, by table."""
    tensors: dict[str, Any] = {}
    offset = 0
    for part, (dtype, item_bytes) in _PARTS.items():
        for name, count in entries.items():
            length = bucket_count(count) + 1 if part == "starts" else count + WINDOW
            end = offset + length * item_bytes
            tensors[f"{name}.{part}"] = {
                "dtype": dtype,
                "shape": [length],
                "data_offsets": [offset, end],
            }
            offset = end
    return tensors


class IdMaps(Mapping[str, IdMap]):
    """The maps of a version, by table, in one mapped file whose header fits the manifest.

    They have one index between them, so that one lookup can serve the ids of all tables.
    """

    def __init__(self, path: Path, tables: tuple[TableSpec, ...], maps: dict[str, IdMap]) -> None:
        self.path = path
        self._rules = {table.name: table.ids for table in tables}
        self._maps = maps

    @classmethod
    def open(cls, path: Path, tables: tuple[TableSpec, ...]) -> IdMaps:
        """Maps ``path``, the maps of those of ``tables`` whose rule is map, in their order.

        Raises:
            StoreError: missing, truncated, or not the file of ``tables``.
        """
        tables = tuple(table for table in tables if table.ids.rule == "map")
        entries = {table.name: table.ids.entries for table in tables}
        tensors = tensors_of(entries)
        data = map_tensors(path, tensors)
        index = _index(data, sum(entries.values()) + WINDOW * len(entries))
        return cls(path, tables, dict(zip(entries, _split(index, entries), strict=True)))

    def verify(self) -> None:
        """Raises StoreError, naming the table, unless every byte is as it was published."""
        for name, one in self.items():
            found, expected = one.sha256(), self._rules[name].sha256
            if found != expected:
                raise StoreError(
                    f"{self.path}: table {name!r}: sha256 is {found}, the manifest has {expected}: "
                    "changed since it was published"
                )

    def __getitem__(self, name: str) -> IdMap:
        return self._maps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._maps)

    def __len__(self) -> int:
        return len(self._maps)


def _index(data: NDArray[np.uint8], slots: int) -> IdIndex:
    """The index of all tables in the data of their file, where like parts follow one another."""
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
