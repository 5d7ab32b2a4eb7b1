"""Reads a line of deltas, and checks that every delta continues the one before it.

Never imports torch, never writes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from embedserve_store.deltas.row_numbers import RowNumbers
from embedserve_store.deltas.signing import TrustedKeys
from embedserve_store.errors import MissingFileError, StoreError
from embedserve_store.format.changed_ids import (
    AS_PUBLISHED,
    ChangedIds,
    check_same_ids,
    compose_ids,
    decode_ids,
    no_ids,
    unite_ids,
)
from embedserve_store.format.delta_file import ChangedRows, check_bytes, decode, repeated_row
from embedserve_store.format.delta_manifest import (
    DELTA_SEQ_MAX,
    DELTAS_FOLDER,
    DeltaFile,
    DeltaManifest,
    LinePosition,
    check_seq,
    check_tables,
    manifest_name,
    parse_manifest_name,
    position_of,
)
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.tables_file import TablesFile
from embedserve_store.model_store import ModelStore


def deltas_in_state(
    last: int, first: int, manifest: Callable[[int], DeltaManifest]
) -> Iterator[DeltaManifest]:
    """Yields the deltas after ``first`` whose rows are in the state after delta ``last``, newest
    first. Undone deltas and the undos themselves are left out.

    Args:
        manifest: returns the manifest of a delta, or if it is missing that of the one before.
    """
    seq = last
    while seq > first:
        delta = manifest(seq)
        if delta.reverts_to is None:
            yield delta
            seq = delta.seq - 1
        else:
            seq = delta.reverts_to


def stored_seqs(models: ModelStore, model: str, line: int) -> NDArray[np.int64]:
    """Returns the seqs of the deltas of a line, ascending, without reading one.

    No names are kept: a line may have millions of files.
    """
    names = models.names_beside(model, f"{DELTAS_FOLDER}/{line}")
    found = (seq for name in names if (seq := parse_manifest_name(name)) is not None)
    return np.sort(np.fromiter(found, np.int64))


class DeltaLine:
    """The line of deltas that continues a published version.

    Methods that read several deltas raise StoreError as ``manifest``, ``rows`` and ``ids`` do.

    Attributes:
        start: position of the version's rows.
    """

    def __init__(self, models: ModelStore, base: Manifest, keys: TrustedKeys | None = None) -> None:
        """
        Args:
            base: manifest of the version.
            keys: public keys that may have signed a delta. Default: no delta needs a signature.

        Raises:
            StoreError: the version's fields of compaction are wrong.
        """
        self.start = position_of(base)
        self._folder = f"{base.model}/{DELTAS_FOLDER}/{self.start.line}"
        self._models = models
        self._base = base
        self._keys = keys
        self._tables = {table.name: table for table in base.tables}

    def seqs(self) -> list[int]:
        """Returns the seqs of the deltas after the version, ascending, without reading one.

        Raises:
            StoreError: the store cannot be read.
        """
        stored = stored_seqs(self._models, self._base.model, self.start.line)
        return [int(seq) for seq in stored if seq > self.start.seq]

    def manifest(self, seq: int) -> tuple[DeltaManifest, LinePosition]:
        """Reads the manifest of a delta, and returns it with the position after the delta.

        Raises:
            StoreError: the delta does not exist, is damaged or belongs elsewhere, lacks the
                signature that is needed, changes a table that the version does not have, or reverts
                to rows before those of the version.
        """
        line, where = self.start.line, self._where(manifest_name(seq))
        check_seq(seq, where)
        delta, text = self._models.delta(self._base.model, line, seq)
        if self._keys is not None:
            self._keys.check(text, where)
        check_tables(delta, self._base, where)
        if delta.reverts_to is not None and delta.reverts_to < self.start.seq:
            raise StoreError(
                f"{where}: reverts to delta {delta.reverts_to}, but version {self._base.version} "
                f"has the deltas up to {self.start.seq}"
            )
        return delta, LinePosition(line, seq, hashlib.sha256(text).hexdigest())

    def deltas(self, last: int | None = None) -> Iterator[tuple[DeltaManifest, LinePosition]]:
        """Yields the manifests of the deltas after the version in order, as ``manifest`` does.

        Args:
            last: the last seq to yield. Default: the last one that is stored.

        Raises:
            StoreError: a delta is missing or damaged, or does not continue the delta before it.
                The deltas before it have been yielded.
        """
        stored = self.seqs()
        if last is None:
            last = stored[-1] if stored else self.start.seq
        there = set(stored)
        position = self.start
        for seq in range(self.start.seq + 1, last + 1):
            if seq not in there:
                raise self.missing(seq, stored)
            delta, after = self.manifest(seq)
            self._check_continues(delta, position)
            position = after
            yield delta, after

    def deltas_in_state(self, last: int) -> Iterator[DeltaManifest]:
        """Yields the deltas after the version whose rows are in the state after delta ``last``,
        newest first, as the function ``deltas_in_state``."""
        return deltas_in_state(last, self.start.seq, lambda seq: self.manifest(seq)[0])

    def between(self, one: int, other: int) -> Iterator[DeltaManifest]:
        """Yields the deltas whose rows are in the state after one of two deltas alone, newest
        first; no delta before the last that both states have is read."""
        states = self.deltas_in_state(one), self.deltas_in_state(other)
        ones, others = (next(state, None) for state in states)
        while (a := ones.seq if ones else 0) != (b := others.seq if others else 0):
            if a > b:
                assert ones
                yield ones
                ones = next(states[0], None)
            else:
                assert others
                yield others
                others = next(states[1], None)

    def rows_between(self, one: int, other: int) -> dict[str, NDArray[np.int64]]:
        """Returns the numbers of the rows that may differ between the states after two deltas, by
        table, unique and ascending.

        One file at a time is in memory, and of the others the row numbers alone.
        """
        numbers: dict[str, RowNumbers] = {}
        for delta in self.between(one, other):
            for changes in self.rows(delta):
                for change in changes:
                    numbers.setdefault(change.table.name, RowNumbers()).add(change.numbers)
        return {table: found.ascending() for table, found in numbers.items()}

    def rows_at(
        self, seq: int, numbers: Mapping[str, NDArray[np.int64]], published: TablesFile
    ) -> Iterator[ChangedRows]:
        """Yields the values of rows in the state after delta ``seq``.

        Deltas are read from ``seq`` back, until every row is found or the version is reached.

        Args:
            numbers: row numbers by table, unique and ascending.
            published: rows of the version.
        """
        values = {name: published.rows(name)[found] for name, found in numbers.items()}
        missing = {name: np.ones(len(found), bool) for name, found in numbers.items()}
        for delta in self.deltas_in_state(seq):
            if not any(one.any() for one in missing.values()):
                break
            for change in (change for changes in self.rows(delta) for change in changes):
                name = change.table.name
                if name not in numbers:
                    continue
                at = np.searchsorted(numbers[name], change.numbers)
                at[at == len(numbers[name])] = 0
                wanted = (numbers[name][at] == change.numbers) & missing[name][at]
                values[name][at[wanted]] = change.values[wanted]
                missing[name][at[wanted]] = False
        for name, found in numbers.items():
            yield ChangedRows(self._tables[name], found, values[name])

    def after(self, position: LinePosition) -> tuple[DeltaManifest, LinePosition] | None:
        """Reads the manifest of the delta that follows ``position``, as ``manifest`` does.

        It is one request, and lists nothing. Returns None if there is no such delta yet.

        Raises:
            StoreError: the delta is damaged, or does not continue the delta at ``position``.
            UnreachableError: the store cannot be reached.
        """
        if position.seq == DELTA_SEQ_MAX:
            return None
        try:
            delta, end = self.manifest(position.seq + 1)
        except MissingFileError:
            return None
        self._check_continues(delta, position)
        return delta, end

    def missing(self, seq: int, stored: list[int]) -> StoreError:
        """Returns the error for a delta that is not among those ``stored``."""
        where = f"{self._models.where}/{self._base.model}"
        has = f"it has {stored[0]} to {stored[-1]}" if stored else "it has none"
        return StoreError(
            f"{where}: delta {seq} of line {self.start.line} does not exist; after version "
            f"{self._base.version} {has}"
        )

    def rows(self, delta: DeltaManifest) -> Iterator[list[ChangedRows]]:
        """Yields the changed rows of each file of ``delta``; one file at a time is in memory.

        Raises:
            StoreError: a file is missing or damaged, or holds rows that the version cannot have.
                Or, after the last file, two files hold the same row.
        """
        seen: dict[str, list[NDArray[np.int64]]] = {}
        for file in delta.files:
            if file.ids:
                continue
            where = self._where(file.name)
            changes = decode(self._read(file), file, self._tables, where)
            for change in changes:
                numbers = seen.setdefault(change.table.name, [])
                numbers.append(change.numbers.copy())  # a view would keep the file's bytes
            yield changes
        for name, numbers in seen.items():
            # The rows of one file ascend.
            if len(numbers) > 1 and (row := repeated_row(*numbers)) is not None:
                where = self._where(manifest_name(delta.seq))
                raise StoreError(f"{where}: table {name!r}: row {row} is in two of its files")

    def ids(self, delta: DeltaManifest) -> dict[str, ChangedIds]:
        """Returns the changed ids of ``delta``, by table.

        Raises:
            StoreError: a file is missing or damaged, or two files have the same id. Or tables that
                share a feature have different changes.
        """
        pieces: dict[str, list[ChangedIds]] = {}
        for file in delta.files:
            if not file.ids:
                continue
            for change in decode_ids(self._read(file), file, self._tables, self._where(file.name)):
                pieces.setdefault(change.table.name, []).append(change)
        where = self._where(manifest_name(delta.seq))
        found = {}
        for name, changes in pieces.items():
            if (one := repeated_row(*(change.ids for change in changes))) is not None:
                raise StoreError(f"{where}: table {name!r}: id {one} is in two of its files")
            found[name] = unite_ids(changes)
        if found:
            check_same_ids(found, self._base, where)
        return found

    def ids_at(self, seq: int) -> dict[str, ChangedIds]:
        """Returns the ids that differ between the version and the state after delta ``seq``, by
        table."""
        deltas = [replace(delta, goldens=None) for delta in self.deltas_in_state(seq) if delta.ids]
        return compose_ids(self.ids(delta) for delta in reversed(deltas))

    def ids_between(self, one: int, other: int) -> dict[str, ChangedIds]:
        """Returns the ids that may differ between the states after two deltas, with their rows
        after delta ``other``, by table."""
        touched = compose_ids(self.ids(delta) for delta in self.between(one, other) if delta.ids)
        if not touched:
            return {}
        states = self.ids_at(other)
        return {
            name: replace(
                change,
                rows=states.get(name, no_ids(change.table)).rows_of(change.ids, AS_PUBLISHED),
            )
            for name, change in touched.items()
        }

    def file_bytes(self, file: DeltaFile) -> bytes:
        """Reads a file of a delta whole.

        Raises:
            StoreError: the file is missing or damaged.
        """
        data = self._read(file)
        check_bytes(data, file, self._where(file.name))
        return data

    def _read(self, file: DeltaFile) -> bytes:
        return self._models.read(f"{self._folder}/{file.name}", file.nbytes)

    def _where(self, name: str) -> str:
        return f"{self._models.where}/{self._folder}/{name}"

    def _check_continues(self, delta: DeltaManifest, position: LinePosition) -> None:
        if delta.previous != position.checksum:
            what = f"delta {position.seq}" if position.seq else f"version {position.line}"
            raise StoreError(
                f"{self._where(manifest_name(delta.seq))}: does not continue {what}: previous is "
                f"{delta.previous}, expected {position.checksum}"
            )
