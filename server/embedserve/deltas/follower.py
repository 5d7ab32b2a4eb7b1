"""Follows the line of one version: reads its deltas in order and applies their rows in steps.

A delta that is missing, damaged or foreign, or whose goldens get other results, is never applied,
nor any delta after it. It is read again at each poll. An undo brings former rows back: from memory
if they are kept there, else from the store. While the line is held, no delta is applied, but what
the store has stays known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import cast

from embedserve.deltas.bounded_line import BoundedLine
from embedserve.deltas.changed_rows_memory import RowsFullError
from embedserve.deltas.live_rows import Change
from embedserve.deltas.merge_changes import merged
from embedserve.deltas.read_changes import CheckRows, WaitingDelta, read_changes
from embedserve.deltas.rows_writer import RowsWriter
from embedserve.deltas.shared_goldens import CheckedGoldens
from embedserve.deltas.status import (
    CATCHING_UP,
    FOLLOWING,
    FULL,
    HELD,
    STALLED,
    Applied,
    DeltaState,
    SharedDeltaState,
)
from embedserve_store.errors import GoldensError, StoreError, UnreachableError, described
from embedserve_store.format.delta_manifest import DeltaManifest, LinePosition
from embedserve_store.goldens.delta_parity import check_delta_goldens
from embedserve_store.goldens.reference_pooling import RowsOf

logger = logging.getLogger(__name__)

STEP_BYTES_MAX = 256 << 20
"""Bytes of files and goldens that one step reads and applies, unless a single delta has more; 256
MiB."""
STEP_DELTAS_MAX = 1000
"""Deltas of one step: the applier sends no heartbeat while it merges them."""
LIST_AFTER_S = 10.0
"""Seconds without a new delta after which the line is listed, so that a gap is found. Doubles with
each listing that finds nothing: listing a long line of an object store takes many requests."""
LIST_AFTER_S_MAX = 300.0


class DeltaFollower:
    """Applies the deltas of one line, as its only writer."""

    def __init__(
        self,
        name: str,
        line: BoundedLine,
        shared: SharedDeltaState,
        room_bytes: int,
        check_on_device: CheckRows | None = None,
    ) -> None:
        """Continues where a follower before it ended, even if it was killed.

        Args:
            name: name that the model is served by, for the log.
            room_bytes: room for changed rows; no step reads more, unless one delta has more.
            check_on_device: raises StoreError for rows that the device of the lookups cannot serve.
        """
        self._name = name
        self._line = line
        self._check_on_device = check_on_device
        self._live, self._rows = shared.live, RowsWriter(shared.live)
        self._manifest = shared.live.version.manifest
        self._status, self._hold = shared.status, shared.hold
        self._goldens = shared.goldens
        self._step_bytes = min(STEP_BYTES_MAX, room_bytes)
        self._state = self._continued(shared.live.seq)
        self._position = self._state.applied.position(line.start.line)
        # Manifests are read ahead of the position during a hold, and while no delta is applied.
        self._known = self._position
        self._undos: list[WaitingDelta] = []
        self._refused_seq = 0  # delta whose goldens got other results: no step goes past it
        self._found_s = time.monotonic()
        self._list_after_s = 0.0

    def poll_once(self) -> bool:
        """Applies the deltas that the store has after the last one, as many as one step holds; none
        during a hold.

        Returns:
            Whether more deltas wait and may be applied at once.
        """
        start_s = time.perf_counter()
        error: StoreError | RowsFullError | None = None
        waiting: list[WaitingDelta] = []
        is_held = self._hold.is_set
        try:
            self._rows.finish_undo()
            self._apply_bound(is_held=is_held)
            self._list_if_due()
            if is_held:
                self._read_ahead(1)
            else:
                self._find(waiting)
        except (StoreError, RowsFullError) as caught:
            error = caught
        try:
            if waiting:
                self._found_s, self._list_after_s = time.monotonic(), LIST_AFTER_S
                self._apply(waiting, start_s)
        except (StoreError, RowsFullError) as caught:
            error = caught
        if error is None:
            has_more = bool(waiting) and self._is_behind
        else:  # without access to the store an undo cannot be read either
            may_read = not is_held and not isinstance(error, UnreachableError)
            has_more = may_read and self._finds_undo()
        self._end(error, has_more=has_more, is_held=is_held)
        return has_more

    @property
    def _is_behind(self) -> bool:
        return self._state.wanted_seq > self._position.seq

    def _continued(self, seq: int) -> DeltaState:
        """Returns the state with the position of ``seq``, the committed one."""
        state = self._status.read()
        applied = state.applied if state.applied.seq == seq else state.applying
        return replace(state, applied=applied, applying=applied)

    def _list_if_due(self) -> None:
        """Lists the line at the start, and ever less often while no delta comes.

        Raises:
            StoreError: the next delta is missing, but a later one is there.
        """
        if time.monotonic() - self._found_s < self._list_after_s:
            return
        stored = self._line.seqs()
        last = stored[-1] if stored else 0
        self._state = replace(self._state, wanted_seq=max(self._position.seq, last))
        following = self._position.seq + 1
        if last > following and following not in stored:
            self._list_after_s = 0.0  # lists at each poll, until the delta is there
            raise self._line.missing(following, stored)
        self._found_s = time.monotonic()
        self._list_after_s = min(max(2 * self._list_after_s, LIST_AFTER_S), LIST_AFTER_S_MAX)

    def _read_ahead(self, most: int | None = None) -> None:
        """Reads up to ``most`` manifests that are not known, and no rows. Raises StoreError at a
        bad one."""
        read = 0
        while read != most and (found := self._line.after(self._known)) is not None:
            delta, self._known = found
            read += 1
            if not self._state.waiting_since:
                self._state = replace(self._state, waiting_since=WaitingDelta(*found).as_of)
            wanted = max(self._state.wanted_seq, delta.seq)
            self._state = replace(self._state, wanted_seq=wanted)
            self._found_s, self._list_after_s = time.monotonic(), LIST_AFTER_S
            if delta.reverts_to is not None:
                self._undos.append(WaitingDelta(*found))

    def _finds_undo(self) -> bool:
        """Returns whether manifests that are read ahead have an undo that is a way past an
        error."""
        before = self._known_undo()
        with suppress(StoreError):
            self._read_ahead()
        return self._known_undo() is not before

    def _known_undo(self) -> WaitingDelta | None:
        """Returns the last undo that was read ahead and leaves none of the deltas before it."""
        last = self._line.last_seq
        for undo in reversed(self._undos):
            is_shown = last is None or undo.end.seq <= last
            if is_shown and cast(int, undo.delta.reverts_to) <= self._position.seq:
                return undo
        return None

    def _find(self, waiting: list[WaitingDelta]) -> None:
        """Adds the deltas of the next step to ``waiting``. Raises StoreError at a bad manifest;
        the deltas before it are in ``waiting``."""
        if (undo := self._known_undo()) is not None:
            waiting.append(undo)
            return
        end, nbytes = self._position, 0
        while (found := self._line.after(end)) is not None:
            delta, end = found
            nbytes += delta.nbytes + (delta.goldens.nbytes if delta.goldens else 0)
            wanted = max(self._state.wanted_seq, delta.seq)
            self._state = replace(self._state, wanted_seq=wanted)
            if self._takes_back(delta):
                waiting[:] = [WaitingDelta(delta, end)]  # the others are undone
                return
            if waiting and (nbytes > self._step_bytes or len(waiting) == STEP_DELTAS_MAX):
                return
            if not waiting:
                self._state = replace(self._state, waiting_since=WaitingDelta(delta, end).as_of)
            waiting.append(WaitingDelta(delta, end))
            if delta.seq == self._refused_seq:
                return

    def _takes_back(self, delta: DeltaManifest) -> bool:
        """Returns whether ``delta`` is an undo of deltas that are applied."""
        return delta.reverts_to is not None and delta.reverts_to < self._position.seq

    def _apply(self, waiting: Sequence[WaitingDelta], start_s: float) -> None:
        """Applies all of ``waiting`` at once. If there is no room, or the goldens of the last one
        get other results, applies one after the other.

        Raises:
            RowsFullError: there is no room for one of them; those before it are applied.
            GoldensError: the rows after one of them do not give the results of its goldens; those
                before it are applied.
            StoreError: the rows of one of them cannot be read; those before it are applied.
        """
        if self._takes_back(waiting[0].delta):
            self._revert(waiting[0], start_s)
            return
        read, error = read_changes(self._line, waiting, self._position.seq, self._check_on_device)
        try:
            readable = [one for deltas, _ in read for one in deltas]
            if readable:
                self._apply_once(readable, [one for _, rows in read for one in rows], start_s)
        except (RowsFullError, GoldensError):
            if len(read) == 1:
                raise
            for deltas, rows in read:
                self._apply_once(deltas, rows, start_s)
        if error is not None:
            raise error

    def _apply_once(
        self, waiting: Sequence[WaitingDelta], changes: Sequence[Change], start_s: float
    ) -> None:
        last = waiting[-1]
        self._announce(last.end, last.as_of)
        try:
            check = partial(self._check_goldens, last.delta)
            self._rows.apply(last.end.seq, merged(self._live.as_rows(changes)), check)
        except GoldensError:
            self._refused_seq = last.end.seq
            raise
        self._advance(waiting, start_s)

    def _check_goldens(self, delta: DeltaManifest, rows_of: RowsOf) -> None:
        """Compares the goldens of a delta with rows that are not visible yet, and hands the goldens
        on to the workers. Raises GoldensError if they differ."""
        if delta.goldens is None:
            self._goldens.clear()
            return
        where = f"delta {delta.seq}"
        bounds = check_delta_goldens(delta.goldens, self._manifest, rows_of, where)
        self._goldens.write(CheckedGoldens(delta.seq, delta.goldens, bounds))

    def _revert(self, undo: WaitingDelta, start_s: float) -> None:
        """Brings the rows before an undo back.

        Raises:
            RowsFullError: they are no longer in memory, and there is no room for them.
            StoreError: they are no longer in memory, and the store cannot be read. Or lookups
                still read the undone rows; if they do once the rows are back, the next poll waits
                for them.
        """
        target, seq = cast(int, undo.delta.reverts_to), undo.end.seq
        self._announce(undo.end, undo.as_of)
        self._bring_back(target, seq)
        self._advance([undo], start_s)
        why = " ".join(undo.delta.why.split())
        logger.warning("%s: delta %d reverts to delta %d: %s", self._name, seq, target, why)
        self._rows.finish_undo()

    def _apply_bound(self, *, is_held: bool) -> None:
        """Counts only deltas that the version may have, and goes back where it has later ones.

        Args:
            is_held: whether the rows are to stay as they are.

        Raises:
            RowsFullError, StoreError: as ``_revert``.
        """
        last, start = self._line.last_seq, self._line.start
        if last != self._state.at_seq:
            self._found_s, self._list_after_s = time.monotonic(), LIST_AFTER_S  # a gap counts now
            self._state = replace(self._state, at_seq=last)
        if last is None:
            return
        wanted = min(self._state.wanted_seq, max(last, self._position.seq))
        self._state = replace(self._state, wanted_seq=wanted)
        target = max(last, start.seq)
        if self._position.seq > target and not is_held:
            try:
                self._go_back(target)
            except (RowsFullError, StoreError) as error:
                raise type(error)(f"cannot go back to delta {target}: {error}") from error
            self._rows.finish_undo()

    def _go_back(self, target: int) -> None:
        """Brings the rows after delta ``target`` back. Raises as ``_revert``."""
        end, as_of = self._line.start, 0.0
        if target > end.seq:
            delta, end = self._line.manifest(target)
            as_of = WaitingDelta(delta, end).as_of
        self._announce(end, as_of)
        self._bring_back(target, target)
        self._position = self._known = end
        self._undos.clear()
        applied = self._state.applying
        self._write(replace(self._state, applied=applied, wanted_seq=target, waiting_since=0.0))
        logger.warning("%s: goes back to delta %d, the last that it may have", self._name, target)

    def _bring_back(self, target: int, seq: int) -> None:
        """Makes the rows after delta ``target`` those of ``seq``. Raises as ``_revert``."""
        if not self._rows.revert(target, seq):
            numbers = self._line.rows_between(self._position.seq, target)
            rows = self._line.rows_at(target, numbers, self._live.tables)
            ids = self._line.ids_between(self._position.seq, target)
            self._rows.apply(seq, self._live.as_rows([*rows, *ids.values()]))

    def _announce(self, end: LinePosition, as_of: float) -> None:
        """Writes the position that a commit is about to reach: a follower that continues finds it
        for the seq that was committed."""
        self._write(replace(self._state, applying=Applied(end.seq, as_of, end.checksum)))

    def _advance(self, waiting: Sequence[WaitingDelta], start_s: float) -> None:
        """Writes the position after ``waiting``, which have been applied."""
        now, state = time.time(), self._state
        freshness = state.freshness_seconds
        for one in waiting:
            freshness = freshness.plus(max(0.0, now - one.as_of))
        self._position = waiting[-1].end
        if self._known.seq < self._position.seq:
            self._known = self._position
        self._undos = [undo for undo in self._undos if undo.end.seq > self._position.seq]
        self._write(
            replace(
                state,
                applied=state.applying,
                waiting_since=0.0,
                rows=state.rows + sum(sum(w.delta.rows.values()) for w in waiting),
                nbytes=state.nbytes + sum(w.delta.nbytes for w in waiting),
                undos=state.undos + sum(w.delta.reverts_to is not None for w in waiting),
                apply_seconds=state.apply_seconds.plus(time.perf_counter() - start_s),
                freshness_seconds=freshness,
            )
        )

    def _end(
        self, error: StoreError | RowsFullError | None, *, has_more: bool, is_held: bool
    ) -> None:
        """Writes the status after a poll, and logs once a new reason and the effect of a hold."""
        before, is_behind = self._state, self._is_behind
        state, reason, refused = CATCHING_UP if is_behind else FOLLOWING, "", before.refused
        if error is not None:
            state, reason = FULL if isinstance(error, RowsFullError) else STALLED, described(error)
            if reason != before.reason:
                refused += 1
                last = self._known.seq if is_held else self._position.seq
                logger.error("%s: no delta after %d: %s", self._name, last, reason)
        elif before.is_stopped and not is_held:
            logger.info("%s: deltas are applied again", self._name)
        if is_held:
            state = HELD
        if is_held != (before.state == HELD):
            effect = f"after {self._position.seq} are held" if is_held else "are held no longer"
            logger.info("%s: deltas %s", self._name, effect)
        waits = error is not None or is_behind
        self._write(
            replace(
                before,
                state=state,
                reason=reason,
                refused=refused,
                waiting_since=(before.waiting_since or time.time()) if waits else 0.0,
                looked_at=time.time(),
                is_ready=before.is_ready or not has_more,
                rows_changed=self._rows.rows_changed,
                ids_changed=self._rows.ids_changed,
                memory_bytes=self._rows.memory_bytes,
                undo_from=self._rows.undo_from,
            )
        )

    def _write(self, state: DeltaState) -> None:
        self._state = state
        self._status.write(state)
