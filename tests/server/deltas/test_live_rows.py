"""Live rows: each lookup reads one state of all tables, whatever is written meanwhile."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from server.deltas.tables import (
    SPECS,
    State,
    by_feature,
    changed,
    random_changes,
    read,
    state_of,
    version_of,
)

from embedserve.deltas import membarrier
from embedserve.deltas.live_rows import NUMBER_MAX, LiveRows, RowsFullError
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.rows_writer import RowsWriter
from embedserve_store import ModelVersion, StoreError
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.table_spec import TableSpec

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> ModelVersion:
    return version_of(tmp_path_factory.mktemp("live"))


@pytest.fixture
def live(version: ModelVersion) -> LiveRows:
    return LiveRows(version, 64 << 10, readers=2)


@pytest.fixture
def reader(live: LiveRows, version: ModelVersion) -> RowsReader:
    return RowsReader(live, 0, version.plan)


class KilledError(Exception):
    """Stands for the end of a writer."""


def same(one: State, other: State) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in other)


class LookupsAndDeltas(RuleBasedStateMachine):
    """Any order of deltas, lookups that begin, read and end, and writers that are killed."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        version = version_of(Path(self.folder.name))
        # Room for some hundred of the rows, so that spare rows are used again and run out.
        self.live = LiveRows(version, 20 << 10, readers=2)
        self.readers = [RowsReader(self.live, number, version.plan) for number in range(2)]
        self.writer = RowsWriter(self.live)
        self.state, self.seq = state_of(version), 0
        self.lookups: list[tuple[RowsReader, int, State]] = []

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(seed=SEEDS, most=st.integers(0, 200))
    def push(self, seed: int, most: int) -> None:
        changes = random_changes(np.random.default_rng(seed), most)
        try:
            self.writer.apply(self.seq + 1, changes)
        except RowsFullError:
            return
        self.seq, self.state = self.seq + 1, changed(self.state, changes)

    @rule(seed=SEEDS, most=st.integers(1, 60), calls=st.integers(0, 2))
    def kill_the_writer(self, seed: int, most: int, calls: int) -> None:
        """The barriers lie between the steps of the writer: the last comes before the commit."""

        def barrier() -> None:
            nonlocal calls
            if not calls:
                raise KilledError
            calls -= 1

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(membarrier, "barrier", barrier)
            with contextlib.suppress(KilledError, RowsFullError):
                self.writer.apply(self.seq + 1, random_changes(np.random.default_rng(seed), most))
        self.writer = RowsWriter(self.live)

    @rule(which=st.integers(0, 1))
    def begin(self, which: int) -> None:
        reader = self.readers[which]
        view, seq = reader.begin()
        assert seq == self.seq
        self.lookups.append((reader, view, by_feature(self.state)))

    @precondition(lambda self: self.lookups)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        reader, view, _ = self.lookups.pop(which % len(self.lookups))
        reader.end(view)

    @invariant()
    def every_lookup_reads_its_state(self) -> None:
        for reader, view, state in self.lookups:
            assert same(read(self.live, reader, view), state)

    @invariant()
    def new_lookups_read_the_last_state(self) -> None:
        view, seq = self.live.committed
        assert seq == self.seq == self.live.seq
        assert same(read(self.live, self.readers[0], view), by_feature(self.state))
        assert self.writer.memory_bytes <= self.live.memory_max


TestLookupsAndDeltas = LookupsAndDeltas.TestCase
TestLookupsAndDeltas.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def rows_of(spec: TableSpec, *numbers: int) -> ChangedRows:
    values = np.zeros((len(numbers), spec.row_bytes), np.uint8)
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
    with pytest.raises(RowsFullError, match="table 'user' has 28 rows for changes, and 7 more"):
        writer.apply(5, [change])
    reader.end(view)
    writer.apply(5, [change])


def test_the_cell_of_a_reader_that_ended_is_cleared(live: LiveRows, version: ModelVersion) -> None:
    """A process that follows another in its place registers itself anew."""
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

    def stand_still(number: int, view: int) -> None:
        monkeypatch.setattr(live, "set_cell", set_cell)
        for seq in range(1, 6):
            writer.apply(seq, [rows_of(SPECS[0], *range(300))])
        set_cell(number, view)

    monkeypatch.setattr(live, "set_cell", stand_still)
    assert reader.begin() == live.committed
    assert live.oldest_read() == live.committed[0]


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
    with pytest.raises(StoreError, match=f"seq {NUMBER_MAX + 1} is too large: compact the line"):
        writer.apply(NUMBER_MAX + 1, [])


def test_more_spare_rows_than_a_uint32_counts_are_refused(version: ModelVersion) -> None:
    with pytest.raises(StoreError, match=r"1099511627776 bytes of changed rows are .* spare rows"):
        LiveRows(with_rows(version, 1 << 30), 1 << 40, 1)


def with_rows(version: ModelVersion, rows: int) -> ModelVersion:
    tables = tuple(replace(spec, num_embeddings=rows) for spec in SPECS)
    return replace(version, manifest=replace(version.manifest, tables=tables))


def test_a_feature_of_two_tables_is_refused(version: ModelVersion) -> None:
    tables = (SPECS[0], replace(SPECS[1], feature_names=("user", "history")))
    manifest = replace(version.manifest, tables=tables)
    with pytest.raises(StoreError, match="feature 'history' is looked up in the tables"):
        LiveRows(replace(version, manifest=manifest), 1 << 20, 1)


def test_column_shards_are_refused(live: LiveRows, version: ModelVersion) -> None:
    plan = version.plan
    column_wise = replace(plan.tables["user"], sharding_type="column_wise")
    plan = replace(plan, tables={**plan.tables, "user": column_wise})
    with pytest.raises(StoreError, match="table 'user' is column_wise"):
        RowsReader(live, 0, plan)
