"""Finds the changes of vocabularies that a push makes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from embedserve_store.deltas.encode_changes import HashedChanges, Ids, RowsOfIds, hash_ids
from embedserve_store.deltas.line_appender import LineAppender
from embedserve_store.deltas.vocabularies import LineVocabularies, RequestedIds, named_changes
from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.changed_ids import REMOVED, ChangedIds, compose_ids
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.publishing.ranks import Ranks

AssignedIds = Mapping[str, tuple[Ids, Any]]
"""Ids, and the row that each has in training, by table."""
RemovedIds = Mapping[str, Ids]
"""Ids that have no row any more, by table."""


class PushedIds:
    """The vocabularies of a line, as one training job changes them; the same on all ranks.

    They are read when they are first needed: the version's own, and the ids of all deltas since.
    """

    def __init__(self, line: LineAppender, ranks: Ranks) -> None:
        self._line, self._ranks = line, ranks
        self._tables = {table.name: table for table in line.base.tables}
        self._has_any = any(table.ids.rule == "map" for table in line.base.tables)
        self._opened: LineVocabularies | None = None
        self._kept: dict[str, ChangedIds] = {}
        """Changes by table until a delta with them is written."""

    def row_changes(
        self, changes: HashedChanges, removed: Callable[[], RemovedIds]
    ) -> dict[str, ChangedIds]:
        """Returns the changes for the ids of pushed rows, new ones among them; a collective.

        Args:
            removed: returns the removed ids of this rank.

        Raises:
            InvalidModelError: on all ranks, as LineVocabularies.find_changes. Or an id is pushed
                and removed at once, or a table has no vocabulary.
        """
        self._open()
        return self._find(self._gather(lambda: self._request_for_rows(changes, removed())))

    def assigned_changes(
        self, own: Callable[[], tuple[AssignedIds, RemovedIds]]
    ) -> dict[str, ChangedIds]:
        """Returns the changes for ids whose rows training has chosen; a collective.

        They are kept until ``advance``: the next push has them, too, unless it names their ids.

        Args:
            own: returns the new ids with their rows, and the removed ids, of this rank.

        Raises:
            InvalidModelError: on all ranks, as LineVocabularies.find_changes. Or a table has no
                vocabulary. The ids are not kept.
            StoreError: on all ranks: the vocabularies cannot be read. The ids are kept.
        """
        every = self._gather(lambda: self._request_as_assigned(*own()))
        named = named_changes(self._line.base, every)
        try:
            self._open()
        except StoreError:
            self._kept = compose_ids([self._kept, named])
            raise
        changes = self._find(every)
        self._kept = compose_ids([self._kept, named])
        return changes

    def keep(self, own: Callable[[], tuple[AssignedIds, RemovedIds]]) -> None:
        """Keeps the ids of a push that cannot begin, as ``assigned_changes``; a collective.

        Raises:
            InvalidModelError: on all ranks, as ``assigned_changes``. The ids are not kept.
        """
        every = self._gather(lambda: self._request_as_assigned(*own()))
        self._kept = compose_ids([self._kept, named_changes(self._line.base, every)])

    def rows_after(self, changes: Mapping[str, ChangedIds]) -> dict[str, RowsOfIds]:
        """Returns functions by table that return the rows of ids after ``changes``; -1 for an id
        without a row. A collective."""
        self._open()
        return {
            name: partial(self._vocabularies.rows_after, changes, name)
            for name, table in self._tables.items()
            if table.ids.rule == "map"
        }

    def advance(self, changes: Mapping[str, ChangedIds]) -> None:
        """Makes ``changes`` part of the vocabularies: their delta is written."""
        self._kept = {}
        if self._opened is not None:
            self._opened.advance(changes)

    def take_again(self, undone: Mapping[str, ChangedIds]) -> None:
        """Continues after an undo: the next push has the undone changes again.

        Changes that are kept already are newer, and win.

        Args:
            undone: ids that the undo changed, by table, with the rows that they had before it.
        """
        self._opened = None
        self._kept = compose_ids([undone, self._kept])

    def _gather(self, request: Callable[[], RequestedIds]) -> list[RequestedIds]:
        """Returns what each rank wants, nothing if the version has no vocabularies; a collective.

        It raises for ids of a table without a vocabulary.
        """
        own = self._ranks.on_all(request)
        return self._ranks.from_all(own) if self._has_any else []

    def _find(self, every: list[RequestedIds]) -> dict[str, ChangedIds]:
        if not any(every) and not self._kept:
            return {}
        kept = self._kept
        return self._ranks.on_first(lambda: self._vocabularies.find_changes(every, kept))

    def _open(self) -> None:
        """Reads the vocabularies, or what changed since, if the version has some; a collective."""
        if not self._has_any:
            return
        passed = self._line.advance_past_own()
        if self._opened is not None:
            self._opened.advance(passed)
        else:
            changed = self._ranks.on_first(self._line.changed_ids)
            id_maps = self._ranks.on_all(self._line.id_maps)
            self._opened = LineVocabularies(self._line.base, id_maps, changed)
            self._kept = {name: self._published(change) for name, change in self._kept.items()}
        self._kept = compose_ids([passed, self._kept])

    @property
    def _vocabularies(self) -> LineVocabularies:
        assert self._opened is not None
        return self._opened

    def _published(self, change: ChangedIds) -> ChangedIds:
        """Returns ``change`` with the rows of the version for ids that are as published."""
        rows = self._vocabularies.published(change.table.name, change.ids)
        return replace(change, rows=np.where(change.rows < REMOVED, rows, change.rows))

    def _request_for_rows(self, changes: HashedChanges, removed: RemovedIds) -> RequestedIds:
        gone = self._hashed(removed)
        new = {}
        for name, (hashed, _) in changes.items():
            if self._tables[name].ids.rule != "map":
                continue
            both = np.flatnonzero(np.isin(hashed, gone.get(name, hashed[:0])))
            if len(both):
                at = both[0]
                raise InvalidModelError(
                    f"table {name!r}: ids[{at}] is {hashed[at]}, which is removed in the same delta"
                )
            unknown = hashed[self._vocabularies.rows_of(name, hashed) < 0]
            if len(unknown):
                new[name] = unknown
        return RequestedIds(new=new, removed=gone)

    def _request_as_assigned(self, vocabulary: AssignedIds, removed: RemovedIds) -> RequestedIds:
        assigned = {}
        for name, (ids, rows) in vocabulary.items():
            hashed = hash_ids(self._table(name), ids)
            numbers = np.asarray(rows.cpu() if hasattr(rows, "cpu") else rows)
            if numbers.shape != hashed.shape or (numbers.size and numbers.dtype.kind not in "iu"):
                raise InvalidModelError(
                    f"table {name!r}: vocabulary: rows are {numbers.dtype} {list(numbers.shape)}, "
                    f"expected integers [{len(hashed)}], one for each id"
                )
            assigned[name] = hashed, numbers.astype(np.int64)
        return RequestedIds(assigned=assigned, removed=self._hashed(removed))

    def _hashed(self, removed: RemovedIds) -> dict[str, Any]:
        return {name: hash_ids(self._table(name), ids) for name, ids in removed.items()}

    def _table(self, name: str) -> TableSpec:
        """Returns a table with a vocabulary. Raises InvalidModelError for any other name."""
        if name not in self._tables:
            raise InvalidModelError(
                f"table {name!r} is not in the model; tables are {', '.join(self._tables)}"
            )
        table = self._tables[name]
        if table.ids.rule != "map":
            raise InvalidModelError(
                f"table {name!r} has no vocabulary (its ids have the rule {table.ids.rule!r}): its "
                "ids cannot be added or removed"
            )
        return table
