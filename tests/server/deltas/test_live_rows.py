"""Tests of live rows: each lookup reads one state of all tables, whatever is written meanwhile."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from server.deltas.tables import (
    SHARED_SPECS,
    SPECS,
    State,
    by_key,
    changed,
    random_changes,
    read,
    state_of,
    version_of,
)

from embedserve.deltas import live_rows, membarrier
from embedserve.deltas.live_rows import NUMBER_MAX, LiveRows
from embedserve.deltas.memory import RowsFullError
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.rows_writer import RowsWriter
from embedserve_store import ModelVersion, StoreError
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.plan import Plan, Shard, TablePlan

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> ModelVersion:
    return version_of(tmp_path_factory.mktemp("live"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> ModelVersion:
    return version_of(tmp_path_factory.mktemp("shared"), SHARED_SPECS)


@pytest.fixture
def live(version: ModelVersion) -> LiveRows:
    return LiveRows(version, 64 << 10, readers=2)


@pytest.fixture
def reader(live: LiveRows, version: ModelVersion) -> RowsReader:
    return RowsReader(live, 0, version.plan)


class KilledError(Exception):
    """Stands for the kill of a writer."""


def same(one: State, other: State) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in other)


class Device:
    """Copies of the spare rows, as a GPU has them, and a reader in a process of its own."""

    def __init__(self, live: LiveRows, reader: int, plan: Plan) -> None:
        self.live = copy.copy(live)  # as in a forked process
        self.rows = {name: np.zeros_like(rows) for name, rows in live.rows.items()}
        self.uploads, self._view = 0, 0
        self.reader = RowsReader(self.live, reader, plan, self.upload)

    def upload(self, view: int) -> None:
        for spare, written in self.live.written_since(self._view):
            for table in spare.tables:
                self.rows[table.name][written] = self.live.rows[table.name][written]
            self.uploads += len(written)
        self._view = max(self._view, view)


class LookupsAndDeltas(RuleBasedStateMachine):
    """Runs deltas, undos, lookups that begin, read and end, and kills of writers, in any order."""

    specs: tuple[TableSpec, ...] = SPECS

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        version = version_of(Path(self.folder.name), self.specs)
        # There is room for a few hundred rows, so that spare rows run out and are used again.
        self.live = LiveRows(version, 20 << 10, readers=3, undo=3)
        self.device, self.device_seq = Device(self.live, 2, version.plan), 0
        self.readers = [RowsReader(self.live, number, version.plan) for number in range(2)]
        self.writer = RowsWriter(self.live)
        self.states, self.kept = [state_of(version)], [0]
        self.lookups: list[tuple[RowsReader, int, State]] = []

    @property
    def seq(self) -> int:
        return len(self.states) - 1

    def changes(self, seed: int, most: int) -> list[ChangedRows]:
        return random_changes(np.random.default_rng(seed), most, self.specs)

    def teardown(self) -> None:
        """Checks that every spare row is the newest of its row or free, once no lookup or undo
        needs others."""
        for reader, view, _ in self.lookups:
            reader.end(view)
        for seq in range(self.seq + 1, self.seq + 6):
            self.device.reader.advance()
            self.writer.apply(seq, [])
        free = sum(one.count for one in self.writer._free)
        assert free + np.count_nonzero(self.live.newest) == self.live.peaks.sum()
        self.folder.cleanup()

    @rule(seed=SEEDS, most=st.integers(0, 200))
    def push(self, seed: int, most: int) -> None:
        changes = self.changes(seed, most)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(time, "sleep", self.end_a_later_lookup)
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
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(time, "sleep", self.end_a_later_lookup)
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
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(time, "sleep", self.end_a_later_lookup)
            self.writer.finish_undo()
        with killed_at_barrier(calls), contextlib.suppress(RowsFullError):
            self.writer.apply(self.seq + 1, self.changes(seed, most))
        self.restart_the_writer()

    @rule(calls=st.integers(0, 1))
    def kill_the_writer_in_an_undo(self, calls: int) -> None:
        """Kills the writer at a barrier. The undo is visible before the first one."""
        target = self.writer.undo_from
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(time, "sleep", self.end_a_later_lookup)
            self.writer.finish_undo()
        self.states.append(self.states[target])
        with pytest.MonkeyPatch.context() as patched, killed_at_barrier(calls):
            patched.setattr(time, "sleep", self.end_a_later_lookup)
            self.writer.revert(target, self.seq)
            self.writer.finish_undo()
        self.restart_the_writer()

    def restart_the_writer(self) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(time, "sleep", self.end_a_later_lookup)
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
            assert same(read(self.live, reader, view, device), state)

    @invariant()
    def the_last_state_is_committed(self) -> None:
        assert self.live.seq == self.seq
        self.new_lookups_read_the_committed_state()
        assert self.writer.memory_bytes <= self.live.memory_max

    def new_lookups_read_the_committed_state(self) -> None:
        view, seq = self.live.committed
        assert same(read(self.live, self.readers[0], view), by_key(self.live, self.states[seq]))


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


def rows_of(spec: TableSpec, *numbers: int, value: int = 0) -> ChangedRows:
    values = np.full((len(numbers), spec.row_bytes), value, np.uint8)
    return ChangedRows(spec, np.array(numbers, np.int64), values)


def test_spare_rows_are_used_again_without_end(live: LiveRows, reader: RowsReader) -> None:
    writer = RowsWriter(live)
    for seq in range(1, 500):
        view, _ = reader.begin()
        writer.apply(seq, [rows_of(SPECS[0], *range(300))])
        reader.end(view)
    assert writer.rows_changed == 300
    assert writer.memory_bytes == 2 * 300 * (SPECS[0].row_bytes + 8)


def test_a_lookup_that_hangs_lets_memory_run_full_until_it_ends(
    live: LiveRows, reader: RowsReader
) -> None:
    writer, view = RowsWriter(live), reader.begin()[0]
    change = rows_of(SPECS[0], *range(300))
    for seq in range(1, 6):
        writer.apply(seq, [change])
    with pytest.raises(RowsFullError, match=r"have 60000 bytes, 12000 more .* limit is 65536"):
        writer.apply(6, [change])
    assert live.seq == 5
    reader.end(view)
    writer.apply(6, [change])
    assert live.seq == 6


def test_the_spare_rows_of_a_small_table_run_out_before_the_memory(
    live: LiveRows, reader: RowsReader
) -> None:
    writer, view = RowsWriter(live), reader.begin()[0]
    change = rows_of(SPECS[1], *range(7))
    for seq in range(1, 5):
        writer.apply(seq, [change])
    with pytest.raises(RowsFullError, match="table 'user': 28 rows for changes, and 7 more"):
        writer.apply(5, [change])
    reader.end(view)
    writer.apply(5, [change])


def test_the_cell_of_a_reader_that_ended_is_cleared(live: LiveRows, version: ModelVersion) -> None:
    """Covers a process that registers again in the place of one that ended."""
    reader = RowsReader(live, 1, version.plan)
    reader.begin()
    RowsReader(live, 1, version.plan)
    writer = RowsWriter(live)
    for seq in range(1, 50):
        writer.apply(seq, [rows_of(SPECS[0], *range(300))])


def test_a_reader_that_stood_still_before_its_cell_was_set_begins_again(
    live: LiveRows, reader: RowsReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RowsWriter(live)
    set_cell = live.set_cell

    def stand_still(number: int, oldest: int, newest: int) -> None:
        monkeypatch.setattr(live, "set_cell", set_cell)
        for seq in range(1, 6):
            writer.apply(seq, [rows_of(SPECS[0], *range(300))])
        set_cell(number, oldest, newest)

    monkeypatch.setattr(live, "set_cell", stand_still)
    assert reader.begin() == live.committed
    assert live.oldest_read() == live.newest_read() == live.committed[0]


def test_an_undo_needs_no_memory(version: ModelVersion) -> None:
    live = LiveRows(version, 20 << 10, readers=1, undo=8)
    writer, reader = RowsWriter(live), RowsReader(live, 0, version.plan)
    writer.apply(1, [rows_of(SPECS[0], *range(200))])
    before, first = read(live, reader, live.committed[0]), live.newest.copy()
    writer.apply(2, [rows_of(SPECS[0], *range(150, 400), value=7)])
    used = writer.memory_bytes
    assert writer.undo_from == 0
    assert writer.revert(1, 3)
    assert same(read(live, reader, live.committed[0]), before)
    writer.finish_undo()
    assert (live.seq, writer.memory_bytes, writer.rows_changed) == (3, used, 200)
    assert np.array_equal(live.newest, first)
    assert same(read(live, reader, live.committed[0]), before)
    assert writer.revert(0, 4)
    writer.finish_undo()
    assert not live.newest.any()
    assert writer.rows_changed == 0
    for seq in range(5, 60):  # memory of undone rows is free again
        writer.apply(seq, [rows_of(SPECS[0], *range(200))])


def test_rows_kept_for_an_undo_give_way_to_new_ones(version: ModelVersion) -> None:
    live = LiveRows(version, 64 << 10, readers=1, undo=8)
    writer, oldest = RowsWriter(live), []
    for seq in range(1, 20):
        writer.apply(seq, [rows_of(SPECS[0], *range(300))])
        oldest.append(writer.undo_from)
    assert oldest[:4] == [0, 0, 0, 0]
    assert oldest[5:] == [seq - 4 for seq in range(6, 20)]
    assert not writer.revert(oldest[-1] - 1, 20)
    assert live.seq == 19
    assert writer.revert(oldest[-1], 20)


def test_an_undo_takes_the_place_of_the_oldest_state_before_it_is_finished(
    version: ModelVersion,
) -> None:
    live = LiveRows(version, 64 << 10, readers=1, undo=3)
    writer = RowsWriter(live)
    for seq in range(1, 4):
        writer.apply(seq, [])
    assert writer.undo_from == 0
    assert writer.revert(3, 4)
    assert writer.undo_from == 1
    writer.finish_undo()
    assert writer.undo_from == 1
    assert not writer.revert(0, 5)
    assert writer.revert(1, 5)


def test_a_delta_that_does_not_fit_takes_no_rows_from_an_undo(version: ModelVersion) -> None:
    live = LiveRows(version, 20 << 10, readers=1, undo=8)
    writer, reader = RowsWriter(live), RowsReader(live, 0, version.plan)
    writer.apply(1, [rows_of(SPECS[0], *range(200))])
    view, _ = reader.begin()
    writer.apply(2, [rows_of(SPECS[0], *range(200), value=1)])
    with pytest.raises(RowsFullError, match="limit is 20480"):
        writer.apply(3, [rows_of(SPECS[0], *range(600))])
    with pytest.raises(RowsFullError):  # the lookup needs what an undo would free
        writer.apply(3, [rows_of(SPECS[0], *range(200))])
    assert writer.undo_from == 0
    reader.end(view)
    assert writer.revert(1, 3)


def test_a_lookup_that_ends_while_room_is_made_ends_no_writer(
    version: ModelVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = LiveRows(version, 20 << 10, readers=1, undo=0)
    writer, reader = RowsWriter(live), RowsReader(live, 0, version.plan)
    writer.apply(1, [rows_of(SPECS[0], *range(200))])
    view, _ = reader.begin()
    writer.apply(2, [rows_of(SPECS[0], *range(200), value=1)])
    oldest_read = live.oldest_read

    def oldest_before_it_ends() -> int:
        oldest = oldest_read()
        reader.end(view)
        return oldest

    monkeypatch.setattr(live, "oldest_read", oldest_before_it_ends)
    with pytest.raises(RowsFullError):
        writer.apply(3, [rows_of(SPECS[0], *range(200))])
    monkeypatch.undo()
    writer.apply(3, [rows_of(SPECS[0], *range(200))])
    assert live.seq == 3


def test_spare_rows_for_undos_are_fewer_where_not_all_can_be_numbered(
    version: ModelVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = sum(spec.num_embeddings for spec in SPECS)
    monkeypatch.setattr(live_rows, "NUMBER_MAX", 10 * rows)
    live = LiveRows(version, 1 << 30, 1, undo=64)
    assert 9.9 * rows < len(live.views) <= 10 * rows
    assert all(one.count > 9 * one.row_count for one in live.table_spares)


def test_the_next_writer_keeps_no_former_rows(live: LiveRows) -> None:
    live.undo = 8
    writer = RowsWriter(live)
    for seq in range(1, 4):
        writer.apply(seq, [rows_of(SPECS[0], 1)])
    writer = RowsWriter(live)
    assert writer.undo_from == 3
    assert not writer.revert(2, 4)


def test_nothing_is_written_of_a_delta_that_does_not_fit(version: ModelVersion) -> None:
    live = LiveRows(version, 20 << 10, readers=1)
    writer = RowsWriter(live)
    before = live.newest.copy()
    with pytest.raises(RowsFullError):
        writer.apply(1, [rows_of(SPECS[1], 0, 3), rows_of(SPECS[0], *range(1300))])
    assert np.array_equal(live.newest, before)
    assert live.seq == writer.memory_bytes == 0


def test_what_a_killed_writer_wrote_is_free_again(
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


def test_published_rows_cannot_be_written(live: LiveRows) -> None:
    with pytest.raises(ValueError, match="read-only"):
        live.tables.data[0] = 1


def test_a_seq_past_a_uint32_is_refused(live: LiveRows) -> None:
    writer = RowsWriter(live)
    with pytest.raises(StoreError, match=f"seq {NUMBER_MAX + 1} or view .* restart"):
        writer.apply(NUMBER_MAX + 1, [])


def test_more_spare_rows_than_a_uint32_counts_are_refused(version: ModelVersion) -> None:
    with pytest.raises(StoreError, match=r"1099511627776 bytes of changed rows are .* spare rows"):
        LiveRows(with_rows(version, 1 << 30), 1 << 40, 1)


def with_rows(version: ModelVersion, rows: int) -> ModelVersion:
    tables = tuple(replace(spec, num_embeddings=rows) for spec in SPECS)
    return replace(version, manifest=replace(version.manifest, tables=tables))


def test_column_shards_are_made_whole(version: ModelVersion) -> None:
    shards = (Shard(1, 0, 7, 0, 8), Shard(0, 0, 7, 8, 4))
    tables = {**version.plan.tables, "user": TablePlan("column_wise", shards)}
    live = LiveRows(replace(version, plan=replace(version.plan, tables=tables)), 1 << 20, 1)
    plan = live.version.plan
    assert plan.tables["user"] == TablePlan("table_wise", (Shard(1, 0, 7, 0, 12),))
    assert plan.constraints["user"].sharding_types == ("table_wise",)
    assert plan.tables["movie"] == version.plan.tables["movie"]
    RowsReader(live, 0, plan)


def test_only_written_rows_are_uploaded(live: LiveRows, version: ModelVersion) -> None:
    writer, device = RowsWriter(live), Device(live, 1, version.plan)
    writer.apply(1, [rows_of(SPECS[0], 1, 2, 3)])
    writer.apply(2, [rows_of(SPECS[0], 3, value=1), rows_of(SPECS[1], 1)])
    assert device.reader.begin()[1] == 0
    device.reader.advance()
    assert (device.uploads, device.reader.begin()[1]) == (5, 2)
    device.reader.advance()
    writer.apply(3, [rows_of(SPECS[0], 3)])
    device.reader.advance()
    assert device.uploads == 6


def test_lookups_keep_their_view_while_an_upload_fails(
    live: LiveRows, version: ModelVersion
) -> None:
    writer, device = RowsWriter(live), Device(live, 0, version.plan)
    upload = device.upload

    def fail(view: int) -> None:
        raise StoreError("no memory")

    device.reader._upload = fail
    for seq in range(1, 4):
        writer.apply(seq, [rows_of(SPECS[0], 1, value=seq)])
        with pytest.raises(StoreError, match="no memory"):
            device.reader.advance()
        assert device.reader.begin()[1] == device.live.seq == 0
    device.reader._upload = upload
    device.reader.advance()
    assert device.reader.begin()[1] == 3


def test_spare_rows_of_a_group_are_rows_of_all_its_tables(shared: ModelVersion) -> None:
    live = LiveRows(shared, 1 << 20, 1)
    movie, user, title, maker = SHARED_SPECS
    assert [one.tables for one in live.table_spares] == [(movie, title, maker), (user,)]
    entries = live.ids.entries.num_embeddings
    assert len(live.newest) == movie.num_embeddings + user.num_embeddings + entries
    for number, rows in enumerate(live.rows.values(), 1):
        rows[:] = number
    for number, rows in enumerate(live.rows.values(), 1):
        assert (rows == number).all()
    assert same(state_of(live.version), state_of(shared))
    for spare in live.table_spares:
        for spec in spare.tables:
            start = live.tables.offsets[spec.name] + spare.first_row * spec.row_bytes
            rows = live.tables.data[start:][: spare.count * spec.row_bytes]
            assert np.array_equal(rows, live.rows[spec.name].reshape(-1))


def test_copies_of_a_group_count_as_memory(shared: ModelVersion) -> None:
    live = LiveRows(shared, 64 << 10, 1)
    writer = RowsWriter(live)
    movie, user, title, maker = SHARED_SPECS
    row_bytes = movie.row_bytes + title.row_bytes + maker.row_bytes + 8
    writer.apply(1, [rows_of(maker, 1, 2, 3)])
    assert writer.memory_bytes == 3 * row_bytes
    writer.apply(2, [rows_of(movie, 3, 4), rows_of(title, 4, 5, 6), rows_of(user, 1)])
    assert writer.memory_bytes == 7 * row_bytes + user.row_bytes + 8
    assert writer.rows_changed == 7
    most = (64 << 10) // row_bytes
    with pytest.raises(RowsFullError, match=f"{(most - 7) * row_bytes} more are needed"):
        writer.apply(3, [rows_of(title, *range(most - 6))])  # one was used before


def test_the_spare_rows_of_a_group_run_out_before_the_memory(tmp_path: Path) -> None:
    specs = tuple(replace(SPECS[1], name=name) for name in ("one", "two"))
    live = LiveRows(version_of(tmp_path, specs), 1 << 20, 1)
    writer = RowsWriter(live)
    RowsReader(live, 0, live.version.plan).begin()
    for seq in range(1, 5):
        writer.apply(seq, [rows_of(specs[seq % 2], *range(7))])
    with pytest.raises(RowsFullError, match="tables 'one', 'two': 28 rows for changes, and 7 more"):
        writer.apply(5, [rows_of(specs[0], *range(7))])


def test_tables_of_a_group_that_are_sharded_differently_have_no_reader(
    shared: ModelVersion,
) -> None:
    live = LiveRows(shared, 1 << 20, 2)
    shards = (Shard(0, 0, 651, 0, 33), Shard(1, 651, 650, 0, 33))
    tables = {**shared.plan.tables, "title": TablePlan("row_wise", shards)}
    with pytest.raises(StoreError, match="tables 'movie', 'title', 'maker': they share features"):
        RowsReader(live, 0, replace(shared.plan, tables=tables))
