"""Keeps the ids whose rows deltas have changed, in memory that processes share.

A vocabulary is never written to. Each id that a delta has given a row, or has removed, gets an
entry, and the entries are rows of a table of their own: entry 7 has the row of the id as an int64.
They change as rows of embeddings do (live_rows.py): an entry that changes gets a spare row, counts
from a view on, and comes back with an undo.

Which entry an id has is in one hash table of open addressing for all vocabularies: the id is in its
slot or in one of the next. Ids are only added. The writer writes an id before the owner of its
slot, and the entry counts with the view of its delta, so readers need no lock.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embedserve.deltas.changed_rows_memory import RowsFullError
from embedserve.deltas.version_memory import VersionMemory
from embedserve_store.format.changed_ids import ChangedIds
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.ids.id_index import mixed

ROOM_MIN = 1000
"""Ids of a vocabulary that may change, at least, if any may."""
ENTRY_BYTES = 8
NO_OWNER = 0


class LiveIds:
    """Changed ids of the vocabularies of a version. Tables that share features have one vocabulary.

    Attributes:
        entries: the table of entries, one for each slot. A row has the 8 bytes of an int64.
    """

    def __init__(
        self, vocabularies: Sequence[tuple[TableSpec, ...]], percent: float, memory: VersionMemory
    ) -> None:
        """
        Args:
            vocabularies: tables of each vocabulary. Vocabulary n is the owner n + 1 of its ids.
            percent: ids that may change, in percent of those of each vocabulary.

        Raises:
            OSError, StoreError: as VersionMemory.take.
        """
        self._vocabularies = vocabularies
        self._owners = {tables[0].name: n for n, tables in enumerate(vocabularies, NO_OWNER + 1)}
        self._rooms = [0, *(_room(tables[0].ids.entries, percent) for tables in vocabularies)]
        slots = 1 << (2 * max(sum(self._rooms), 1) - 1).bit_length()  # at most half are used
        self.entries = TableSpec(
            name="ids of vocabularies",
            num_embeddings=slots,
            embedding_dim=ENTRY_BYTES // 2,
            feature_names=(),
            pooling="none",
            dtype="float16",
        )
        self._last = slots - 1
        self._shift = np.uint64(64 - (slots - 1).bit_length())
        self._ids = memory.take(8 * slots).view(np.int64)
        self._owner_of = memory.take(4 * slots).view(np.uint32)
        words = memory.take(2 * 8 * len(self._rooms)).view(np.int64)
        self._used, self._salts = words.reshape(2, len(self._rooms))
        if memory.is_new:  # nobody can choose ids that meet in one slot
            self._salts.view(np.uint8)[:] = [*secrets.token_bytes(self._salts.nbytes)]

    @property
    def is_empty(self) -> bool:
        """Returns whether no id has ever changed."""
        return not self._used.any()

    def owners_of(self, features: Sequence[str]) -> NDArray[np.uint32]:
        """Returns the owner of the ids of each feature; NO_OWNER without a vocabulary."""
        owners = dict.fromkeys(features, NO_OWNER)
        for n, tables in enumerate(self._vocabularies, NO_OWNER + 1):
            owners |= {feature: n for table in tables for feature in table.feature_names}
        return np.array([owners[feature] for feature in features], np.uint32)

    def entries_of(self, ids: NDArray[np.int64], owners: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Returns the entries [n] of ``ids`` [n]; -1 for an id that has none.

        Args:
            owners: owner of each id [n].
        """
        slots = self._first_slots(ids, owners)
        found = np.full(len(ids), -1, np.int64)
        left = np.flatnonzero(self._owner_of[slots])  # the slots of most ids are free
        while len(left):
            at = slots[left]
            is_found = self._ids[at] == ids[left]
            is_found &= self._owner_of[at] == owners[left]
            found[left[is_found]] = at[is_found]
            left, at = left[~is_found], at[~is_found] + 1
            at &= self._last
            slots[left] = at
            left = left[self._owner_of[at] != NO_OWNER]
        return found

    def add_changes(self, changes: Sequence[ChangedIds]) -> ChangedRows:
        """Adds the ids of ``changes`` that have no entry. Returns the changes, in order, as rows of
        ``entries``: of an id the last one. One process calls it.

        An added id counts against the room from now on, even if its change is refused or undone.
        Of tables that share a vocabulary, only the changes of the first count.

        Raises:
            RowsFullError: there is no room for the ids of a table. None of them are added.
        """
        entries, rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for change in changes:
            if (owner := self._owners.get(change.table.name)) is not None:
                entries.append(self._entries_with(change, owner))
                rows.append(change.rows)
        numbers, last = np.unique(np.concatenate(entries)[::-1], return_index=True)
        values = np.ascontiguousarray(np.concatenate(rows)[::-1][last])
        return ChangedRows(self.entries, numbers, values.view(np.uint8).reshape(-1, ENTRY_BYTES))

    def count_again(self) -> None:
        """Counts the ids anew, as a writer that was killed may not have counted all."""
        self._used[1:] = np.bincount(self._owner_of, minlength=len(self._rooms))[1:]

    def _entries_with(self, change: ChangedIds, owner: int) -> NDArray[np.int64]:
        """Returns the entries of the changed ids; ids that have none get one."""
        ids, owners = change.ids, np.full(len(change.ids), owner, np.uint32)
        found = self.entries_of(ids, owners)
        new = np.flatnonzero(found < 0)
        used, room = int(self._used[owner]), self._rooms[owner]
        if used + len(new) > room:
            raise RowsFullError(
                f"table {change.table.name!r}: {used} ids of the vocabulary have changed, "
                f"{len(new)} more are to change, the limit is {room}: compact the deltas, or give "
                "more room with delta_new_ids_percent"
            )
        found[new] = self._add(ids[new], owners[new])
        self._used[owner] += len(new)
        return found

    def _add(self, ids: NDArray[np.int64], owners: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Adds ``ids`` [n], each once and none of them there; returns their entries [n]."""
        slots = self._first_slots(ids, owners)
        left = np.arange(len(ids))
        while len(left):
            at = slots[left]
            is_added = self._owner_of[at] == NO_OWNER
            _, first = np.unique(at, return_index=True)  # one id for each slot
            is_first = np.zeros(len(left), bool)
            is_first[first] = True
            is_added &= is_first
            added = left[is_added]
            self._ids[slots[added]] = ids[added]
            self._owner_of[slots[added]] = owners[added]
            left = left[~is_added]
            slots[left] = (slots[left] + 1) & self._last
        return slots

    def _first_slots(self, ids: NDArray[np.int64], owners: NDArray[np.uint32]) -> NDArray[np.int64]:
        slots = mixed(ids ^ self._salts[owners])
        slots >>= self._shift
        return slots.view(np.int64)


def _room(entries: int, percent: float) -> int:
    """Returns the number of ids of a vocabulary that may change."""
    return max(ROOM_MIN, int(entries * percent / 100)) if percent else 0
