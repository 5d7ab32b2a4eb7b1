"""Vocabularies of a version's tables as the deltas of its line have changed them.

The job that trains decides which row a new id gets, and the delta says so. All servers and all
compacted versions therefore agree. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.changed_ids import (
    REMOVED,
    ChangedIds,
    compose_ids,
    removed_ids,
    unite_ids,
)
from embedserve_store.format.delta_file import repeated_row
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.ids.id_map import IdMap

Ids = NDArray[np.int64]
_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True)
class RequestedIds:
    """Changes of vocabularies that a rank asks for, by table. Strings are their hashes.

    Attributes:
        new: ids without a row, which get rows that no id has.
        assigned: ids, and the row that each has in training.
        removed: ids that have no row any more.
    """

    new: Mapping[str, Ids] = field(default_factory=dict)
    assigned: Mapping[str, tuple[Ids, Ids]] = field(default_factory=dict)
    removed: Mapping[str, Ids] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.new or self.assigned or self.removed)


def named_changes(base: Manifest, requests: Sequence[RequestedIds]) -> dict[str, ChangedIds]:
    """Returns the changes for the ids that ranks place or remove, by table.

    Vocabularies are not needed: ids may be among them that have these rows already.

    Raises:
        InvalidModelError: an id is given twice, or has a row outside its table.
    """
    changes: dict[str, ChangedIds] = {}
    for group in base.table_groups:
        if len(found := _named(group, requests)):
            changes |= {table.name: replace(found, table=table) for table in group}
    return changes


class LineVocabularies:
    """Vocabularies after the last delta of a line. Tables that share a feature have one."""

    def __init__(
        self,
        base: Manifest,
        id_maps: Mapping[str, IdMap],
        changed: Mapping[str, ChangedIds],
    ) -> None:
        """
        Args:
            base: manifest of the version.
            id_maps: the version's vocabularies by table.
            changed: ids that deltas have changed since, by table.
        """
        self._groups = [group for group in base.table_groups if group[0].name in id_maps]
        self._id_maps = id_maps
        self._changed = dict(changed)
        self._free: dict[str, _FreeRows] = {}

    def rows_of(self, table: str, ids: Ids) -> Ids:
        """Returns the rows [n] of ``ids`` [n]; -1 for an id that the vocabulary does not have."""
        published = self._id_maps[table].rows_of(ids)
        changed = self._changed.get(table)
        return published if changed is None else changed.rows_of(ids, published)

    def rows_after(self, changes: Mapping[str, ChangedIds], table: str, ids: Ids) -> Ids:
        """Returns the rows [n] of ``ids`` [n] after ``changes``, by table; -1 as ``rows_of``."""
        before = self.rows_of(table, ids)
        return changes[table].rows_of(ids, before) if table in changes else before

    def published(self, table: str, ids: Ids) -> Ids:
        """Returns the rows [n] that ``ids`` [n] have in the version; -1 as ``rows_of``."""
        return self._id_maps[table].rows_of(ids)

    def find_changes(
        self, requests: Sequence[RequestedIds], again: Mapping[str, ChangedIds]
    ) -> dict[str, ChangedIds]:
        """Returns the changes that the ranks want, by table; gives rows to new ids.

        ``advance`` makes them the state of this object, once their delta is written.

        Args:
            again: changes by table that are made, too, for ids that no rank names.

        Raises:
            InvalidModelError: an id that is removed is not in the vocabulary, or an id is given
                twice, or both with a row and removed. Or there is no row left for a new id.
        """
        changes: dict[str, ChangedIds] = {}
        for group in self._groups:
            if len(found := self._of_group(group, requests, again.get(group[0].name))):
                changes |= {table.name: ChangedIds(table, found.ids, found.rows) for table in group}
        return changes

    def advance(self, changes: Mapping[str, ChangedIds]) -> None:
        """Makes ``changes``, by table, part of the vocabularies."""
        for name, change in changes.items():
            if (free := self._free.get(name)) is not None:
                free.advance(self.rows_of(name, change.ids), change.rows)
        self._changed = compose_ids([self._changed, changes])

    def _of_group(
        self,
        group: tuple[TableSpec, ...],
        requests: Sequence[RequestedIds],
        again: ChangedIds | None,
    ) -> ChangedIds:
        """Returns the changes of the vocabulary of a group of tables."""
        first, named = group[0], _named(group, requests)
        removed = named.ids[named.rows == REMOVED]
        is_unknown = self.rows_of(first.name, removed) < 0
        if again is not None:  # an id may be removed before its row was ever published
            is_unknown &= ~np.isin(removed, again.ids)
        if is_unknown.any():
            raise InvalidModelError(
                f"table {first.name!r}: id {removed[is_unknown.argmax()]} is removed, but is not "
                "in the vocabulary"
            )
        changed = named if again is None else again.then(named)
        before = self.rows_of(first.name, changed.ids)
        is_changed = before != changed.rows
        ids, rows, before = changed.ids[is_changed], changed.rows[is_changed], before[is_changed]
        new = np.setdiff1d(_ids_of("new", group, requests), np.concatenate([ids, removed]))
        new_rows = np.zeros(0, np.int64)
        if len(new):
            new_rows = self._free_rows(group).find(len(new), before[before >= 0], rows)
        return unite_ids([ChangedIds(first, ids, rows), ChangedIds(first, new, new_rows)])

    def _free_rows(self, group: tuple[TableSpec, ...]) -> _FreeRows:
        name = group[0].name
        if name not in self._free:
            self._free[name] = _FreeRows(group, self._id_maps[name], self._changed.get(name))
        return self._free[name]


class _FreeRows:
    """Rows of a group of tables that no id has, in the order in which new ids get them: ascending,
    and then those of ids that are removed meanwhile, the longest unused first."""

    def __init__(
        self, group: tuple[TableSpec, ...], id_map: IdMap, changed: ChangedIds | None
    ) -> None:
        self._where = f"table {group[0].name!r}"
        count = min(table.num_embeddings for table in group)
        self._ids_of = np.zeros(count, np.uint32)
        """Number of ids of each row."""
        for start in range(0, len(id_map), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            rows = id_map.rows[block].astype(np.int64)
            if changed is not None:
                rows = changed.rows_of(id_map.ids[block], rows)
            np.add.at(self._ids_of, rows[rows >= 0], 1)
        if changed is not None:
            is_added = (changed.rows >= 0) & (id_map.rows_of(changed.ids) < 0)
            np.add.at(self._ids_of, changed.rows[is_added], 1)
        # The row that unknown ids get is nobody's.
        self._reserved = {t.ids.default_row for t in group if t.ids.unknown == "row"}
        self._is_waiting = self._ids_of == 0
        self._waiting = np.flatnonzero(self._is_waiting)
        """Rows without an id, each once, and some that have one by now."""

    def find(self, count: int, left: Ids, assigned: Ids) -> Ids:
        """Returns ``count`` rows that no id has.

        Args:
            left: rows of ids that are removed, or move to another row, at the same time; each as
                often as an id leaves it.
            assigned: rows that other ids get at the same time.

        Raises:
            InvalidModelError: there are fewer.
        """
        rows, leaving = np.unique(left, return_counts=True)
        emptied = rows[self._ids_of[rows] == leaving]
        taken = np.concatenate([assigned, np.array([*self._reserved], np.int64)])
        found = [np.zeros(0, np.int64)]
        missing = count
        for block in (*self._waiting_blocks(), emptied):
            free = block[~np.isin(block, taken)][:missing]
            found.append(free)
            missing -= len(free)
            if not missing:
                break
        if missing:
            raise InvalidModelError(
                f"{self._where}: {count} new ids, but only {count - missing} rows without an id: "
                "remove ids, or publish the model with more rows"
            )
        return np.concatenate(found)

    def advance(self, before: Ids, after: Ids) -> None:
        """Counts the ids that had the rows ``before`` and have the rows ``after`` [n]; negative
        for an id without a row."""
        np.subtract.at(self._ids_of, before[before >= 0], 1)
        np.add.at(self._ids_of, after[after >= 0], 1)
        emptied = np.unique(before[before >= 0])
        emptied = emptied[(self._ids_of[emptied] == 0) & ~self._is_waiting[emptied]]
        block = self._waiting[:_BLOCK_ROWS]
        while len(block) and self._ids_of[block].all():
            self._drop(len(block))
            block = self._waiting[:_BLOCK_ROWS]
        self._drop(int((self._ids_of[block] == 0).argmax()) if len(block) else 0)
        self._is_waiting[emptied] = True
        self._waiting = np.concatenate([self._waiting, emptied])

    def _drop(self, count: int) -> None:
        """Drops the first rows that wait: each has an id."""
        self._is_waiting[self._waiting[:count]] = False
        self._waiting = self._waiting[count:]

    def _waiting_blocks(self) -> Iterator[Ids]:
        """Yields the rows that wait, without those that have an id by now."""
        for start in range(0, len(self._waiting), _BLOCK_ROWS):
            block = self._waiting[start : start + _BLOCK_ROWS]
            yield block[self._ids_of[block] == 0]


def _named(group: tuple[TableSpec, ...], requests: Sequence[RequestedIds]) -> ChangedIds:
    """Returns the changes for the ids of a group of tables that ranks place or remove."""
    names, where = {table.name for table in group}, f"table {group[0].name!r}"
    assigned = [one.assigned[name] for one in requests for name in names & one.assigned.keys()]
    ids, rows = (_joined(pair[at] for pair in assigned) for at in (0, 1))
    _check_rows(where, ids, rows, min(table.num_embeddings for table in group))
    removed = _ids_of("removed", group, requests)
    if (twice := repeated_row(ids, removed)) is not None:
        raise InvalidModelError(
            f"{where}: id {twice} is given twice: an id has one row, or is removed once"
        )
    return unite_ids([ChangedIds(group[0], ids, rows), removed_ids(group[0], removed)])


def _ids_of(
    what: Literal["new", "removed"], group: tuple[TableSpec, ...], requests: Sequence[RequestedIds]
) -> Ids:
    """Returns the new or removed ids of a group of tables, of all ranks."""
    found = [getattr(one, what) for one in requests]
    return _joined(one[table.name] for one in found for table in group if table.name in one)


def _joined(arrays: Iterable[Ids]) -> Ids:
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def _check_rows(where: str, ids: Ids, rows: Ids, count: int) -> None:
    outside = np.flatnonzero((rows < 0) | (rows >= count))
    if len(outside):
        at = outside[0]
        raise InvalidModelError(
            f"{where}: id {ids[at]} has row {rows[at]}, the table has {count} rows"
        )
