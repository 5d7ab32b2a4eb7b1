"""Tests of live rows by random sequences: deltas, undos, lookups and kills of the writer."""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from server.deltas.fake_device import FakeDevice
from server.deltas.tables import (
    SHARED_SPECS,
    SPECS,
    State,
    by_key,
    changed,
    random_changes,
    read,
    rows_of,
    state_of,
    states_equal,
    version_of,
)

from embedserve.deltas import membarrier
from embedserve.deltas.changed_rows_memory import RowsFullError
from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.rows_writer import RowsWriter
from embedserve_store import ModelVersion
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.table_spec import TableSpec

SEEDS = st.integers(0, 2**32 - 1)


class KilledError(Exception):
    """Stands for the kill of a writer."""


class LookupsAndDeltas(RuleBasedStateMachine):
    """Runs deltas, undos, lookups that begin, read and end, and kills of writers, in any order."""

    specs: tuple[TableSpec, ...] = SPECS

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        version = version_of(Path(self.folder.name), self.specs)
        # There is room for a few hundred rows, so that spare rows run out and are used again.
        self.live = LiveRows(version, 20 << 10, readers=3, undo=3)
        self.device, self.device_seq = FakeDevice(self.live, 2, version.plan), 0
        self.readers = [RowsReader(self.live, number, version.plan) for number in range(2)]
        self.writer = RowsWriter(self.live)
        self.states, self.kept = [state_of(version)], [0]
        self.lookups: list[tuple[RowsReader, int, State]] = []
        # An undo waits for lookups that began before it. Nothing else ends those lookups here.
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(time, "sleep", self.end_a_later_lookup)

    @property
    def seq(self) -> int:
        return len(self.states) - 1

    def changes(self, seed: int, most: int) -> list[ChangedRows]:
        return random_changes(np.random.default_rng(seed), most, self.specs)

    def teardown(self) -> None:
        """Checks that every spare row is the last of its row or free, once no lookup or undo
        needs others."""
        for reader, view, _ in self.lookups:
            reader.end(view)
        for seq in range(self.seq + 1, self.seq + 6):
            self.device.reader.advance()
            self.writer.apply(seq, [])
        free = sum(one.count for one in self.writer._free)
        self.patch.undo()
        assert free + np.count_nonzero(self.live.last_spares) == self.live.peaks.sum()
        self.folder.cleanup()

    @rule(seed=SEEDS, most=st.integers(0, 200))
    def push(self, seed: int, most: int) -> None:
        changes = self.changes(seed, most)
        try:
            self.writer.apply(self.seq + 1, changes)
        except RowsFullError:
            return
        self.states.append(changed(self.states[-1], changes))
        self.kept.append(self.seq)

    @rule(back=st.integers(0, 5), is_finished=st.booleans())
    def undo(self, back: int, is_finished: bool) -> None:
        target, first = max(0, self.seq - back), self.writer.undo_from
        is_kept = target >= first and target in self.kept
        if is_kept:
            self.states.append(self.states[target])
            self.kept = [*self.kept[: self.kept.index(target) + 1], self.seq]
        assert self.writer.revert(target, len(self.states) - is_kept) == is_kept
        self.new_lookups_read_the_committed_state()
        if is_finished:
            self.writer.finish_undo()

    def end_a_later_lookup(self, _: float) -> None:
        """Ends a lookup that began before an undo, which waits for it."""
        self.every_lookup_reads_its_state()
        self.new_lookups_read_the_committed_state()
        committed = self.live.committed[0]
        later = [i for i, (_, view, _) in enumerate(self.lookups) if view > committed]
        if later:
            self.end(later[0])
        else:
            self.advance()

    @rule(seed=SEEDS, most=st.integers(1, 60), calls=st.integers(0, 2))
    def kill_the_writer(self, seed: int, most: int, calls: int) -> None:
        """Kills the writer at a barrier. The barriers lie between its steps, the last of them
        before the commit."""
        self.writer.finish_undo()
        with killed_at_barrier(calls), contextlib.suppress(RowsFullError):
            self.writer.apply(self.seq + 1, self.changes(seed, most))
        self.restart_the_writer()

    @rule(calls=st.integers(0, 1))
    def kill_the_writer_in_an_undo(self, calls: int) -> None:
        """Kills the writer at a barrier. The undo is visible before the first one."""
        target = self.writer.undo_from
        self.writer.finish_undo()
        self.states.append(self.states[target])
        with killed_at_barrier(calls):
            self.writer.revert(target, self.seq)
            self.writer.finish_undo()
        self.restart_the_writer()

    def restart_the_writer(self) -> None:
        self.writer = RowsWriter(self.live)
        self.kept = [self.seq]

    @rule(which=st.integers(0, 1))
    def begin(self, which: int) -> None:
        reader = self.readers[which]
        view, seq = reader.begin()
        assert seq == self.seq
        self.lookups.append((reader, view, by_key(self.live, self.states[-1])))

    @rule()
    def begin_on_the_device(self) -> None:
        view, seq = self.device.reader.begin()
        assert seq == self.device.live.seq == self.device_seq
        self.lookups.append((self.device.reader, view, by_key(self.live, self.states[seq])))

    @rule()
    def advance(self) -> None:
        self.device.reader.advance()
        self.device_seq = self.live.seq

    @precondition(lambda self: self.lookups)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        reader, view, _ = self.lookups.pop(which % len(self.lookups))
        reader.end(view)

    @invariant()
    def every_lookup_reads_its_state(self) -> None:
        for reader, view, state in self.lookups:
            device = self.device.rows if reader is self.device.reader else None
            assert states_equal(read(self.live, reader, view, device), state)

    @invariant()
    def the_last_state_is_committed(self) -> None:
        assert self.live.seq == self.seq
        self.new_lookups_read_the_committed_state()
        assert self.writer.memory_bytes <= self.live.memory_max

    def new_lookups_read_the_committed_state(self) -> None:
        view, seq = self.live.committed
        assert states_equal(
            read(self.live, self.readers[0], view), by_key(self.live, self.states[seq])
        )


@contextlib.contextmanager
def killed_at_barrier(calls: int) -> Iterator[None]:
    """Ends the block at the barrier after the first ``calls``, like a kill."""

    def barrier() -> None:
        nonlocal calls
        if not calls:
            raise KilledError
        calls -= 1

    with pytest.MonkeyPatch.context() as patched, contextlib.suppress(KilledError):
        patched.setattr(membarrier, "barrier", barrier)
        yield


class LookupsAndDeltasOfSharedFeatures(LookupsAndDeltas):
    specs = SHARED_SPECS


TestLookupsAndDeltas = LookupsAndDeltas.TestCase
TestLookupsAndDeltasOfSharedFeatures = LookupsAndDeltasOfSharedFeatures.TestCase
TestLookupsAndDeltas.settings = TestLookupsAndDeltasOfSharedFeatures.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None
)


def test_rows_of_a_killed_writer_are_reused(
    version: ModelVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = LiveRows(version, 20 << 10, readers=1)
    change = rows_of(SPECS[0], *range(400))
    writer, commit = RowsWriter(live), live.commit
    monkeypatch.setattr(live, "commit", lambda view, seq: raise_killed())
    with pytest.raises(KilledError):
        writer.apply(1, [change])
    monkeypatch.setattr(live, "commit", commit)
    assert live.seq == 0
    RowsWriter(live).apply(1, [change])
    assert live.seq == 1


def raise_killed() -> None:
    raise KilledError
