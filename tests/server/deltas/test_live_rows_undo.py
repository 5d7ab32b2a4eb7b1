"""Tests of undos of live rows: the rows kept for them, and the memory that they take."""

import numpy as np
import pytest
from server.deltas.tables import SPECS, read, rows_of, states_equal

from embedserve.deltas import row_groups, rows_writer
from embedserve.deltas.changed_rows_memory import RowsFullError
from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.rows_writer import RowsWriter
from embedserve_store import ModelVersion, StoreError


def test_undo_needs_no_memory(version: ModelVersion) -> None:
    live = LiveRows(version, 20 << 10, readers=1, undo=8)
    writer, reader = RowsWriter(live), RowsReader(live, 0, version.plan)
    writer.apply(1, [rows_of(SPECS[0], *range(200))])
    before, first = read(live, reader, live.committed[0]), live.last_spares.copy()
    writer.apply(2, [rows_of(SPECS[0], *range(150, 400), value=7)])
    used = writer.memory_bytes
    assert writer.undo_from == 0
    assert writer.revert(1, 3)
    assert states_equal(read(live, reader, live.committed[0]), before)
    writer.finish_undo()
    assert (live.seq, writer.memory_bytes, writer.rows_changed) == (3, used, 200)
    assert np.array_equal(live.last_spares, first)
    assert states_equal(read(live, reader, live.committed[0]), before)
    assert writer.revert(0, 4)
    writer.finish_undo()
    assert not live.last_spares.any()
    assert writer.rows_changed == 0
    for seq in range(5, 60):  # memory of undone rows is free again
        writer.apply(seq, [rows_of(SPECS[0], *range(200))])
    for seq in range(60, 70):  # as is that of a killed writer
        RowsWriter(live).apply(seq, [rows_of(SPECS[0], *range(200))])


def test_rows_kept_for_undo_are_released_for_new_rows(version: ModelVersion) -> None:
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


def test_undo_replaces_the_oldest_state_before_finishing(
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


def test_delta_that_exceeds_memory_keeps_the_rows_for_undo(version: ModelVersion) -> None:
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


def test_spare_rows_for_undo_are_capped_by_the_row_number_limit(
    version: ModelVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = sum(spec.num_embeddings for spec in SPECS)
    monkeypatch.setattr(row_groups, "NUMBER_MAX", 10 * rows)
    live = LiveRows(version, 1 << 30, 1, undo=64)
    assert 9.9 * rows < len(live.views) <= 10 * rows
    assert all(one.count > 9 * one.row_count for one in live.table_groups)


def test_restarted_writer_keeps_no_rows_for_undo(live: LiveRows) -> None:
    live.undo = 8
    writer = RowsWriter(live)
    for seq in range(1, 4):
        writer.apply(seq, [rows_of(SPECS[0], 1)])
    writer = RowsWriter(live)
    assert writer.undo_from == 3
    assert not writer.revert(2, 4)


def test_writer_does_not_wait_forever_for_a_lookup_of_undone_rows(
    live: LiveRows, reader: RowsReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_writer, "LOOKUP_S_MAX", 0.01)
    live.undo = 8
    writer = RowsWriter(live)
    for seq in (1, 2):
        writer.apply(seq, [rows_of(SPECS[0], 1, value=seq)])
    before, (view, _) = read(live, reader, live.committed[0]), reader.begin()
    assert writer.revert(1, 3)
    for change in (
        writer.finish_undo,
        lambda: writer.apply(4, [rows_of(SPECS[0], 1, value=4)]),
        lambda: writer.revert(0, 4),
        lambda: RowsWriter(live).finish_undo(),
    ):
        with pytest.raises(StoreError, match=r"lookups still read undone rows after 0\.01 s"):
            change()
        assert live.seq == 3
        assert states_equal(read(live, reader, view), before)
    reader.end(view)
    writer.finish_undo()
    writer.apply(4, [rows_of(SPECS[0], 1, value=4)])
    assert RowsWriter(live).rows_changed == 1


def test_writer_waits_once_for_a_lookup_of_undone_rows(
    live: LiveRows, reader: RowsReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers its successors: each waits once. The lines of other models wait as long."""
    clock = Clock()
    monkeypatch.setattr(rows_writer, "time", clock)
    live.undo = 8
    writer = RowsWriter(live)
    for seq in (1, 2):
        writer.apply(seq, [rows_of(SPECS[0], 1, value=seq)])
    view, _ = reader.begin()
    assert writer.revert(1, 3)
    for waited_s in (5, 10):
        for _ in range(3):
            with pytest.raises(StoreError, match="lookups still read undone rows after 5 s"):
                writer.finish_undo()
        assert clock.slept_s == pytest.approx(waited_s, abs=0.01)
        writer = RowsWriter(live)
    assert clock.slept_s == pytest.approx(15, abs=0.01)
    reader.end(view)
    for seq in range(4, 60):  # memory of undone rows is free again
        writer.apply(seq, [rows_of(SPECS[0], *range(200))])


class Clock:
    """A clock that advances only while its thread sleeps."""

    def __init__(self) -> None:
        self.slept_s = 0.0

    def monotonic(self) -> float:
        return self.slept_s

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
