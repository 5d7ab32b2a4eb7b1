"""Tests of live rows: each lookup reads one state of all tables, whatever is written meanwhile."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from server.deltas.fake_device import FakeDevice
from server.deltas.tables import SHARED_SPECS, SPECS, rows_of, state_of, states_equal, version_of

from embedserve.deltas.changed_rows_memory import RowsFullError
from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.row_groups import NUMBER_MAX
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.rows_writer import RowsWriter
from embedserve_store import ModelVersion, StoreError
from embedserve_store.plans.plan import Shard, TablePlan


@pytest.fixture(scope="module")
def grouped_version(tmp_path_factory: pytest.TempPathFactory) -> ModelVersion:
    return version_of(tmp_path_factory.mktemp("shared"), SHARED_SPECS)


def test_spare_rows_are_reused(live: LiveRows, reader: RowsReader) -> None:
    writer = RowsWriter(live)
    for seq in range(1, 500):
        view, _ = reader.begin()
        writer.apply(seq, [rows_of(SPECS[0], *range(300))])
        reader.end(view)
    assert writer.rows_changed == 300
    assert writer.memory_bytes == 2 * 300 * (SPECS[0].row_bytes + 8)


def test_hanging_lookup_keeps_memory_full_until_its_end(live: LiveRows, reader: RowsReader) -> None:
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


def test_spare_rows_of_a_small_table_run_out_before_memory(
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


def test_cell_of_a_replaced_reader_is_cleared(live: LiveRows, version: ModelVersion) -> None:
    """Covers a process that registers again in the place of one that ended."""
    reader = RowsReader(live, 1, version.plan)
    reader.begin()
    RowsReader(live, 1, version.plan)
    writer = RowsWriter(live)
    for seq in range(1, 50):
        writer.apply(seq, [rows_of(SPECS[0], *range(300))])


def test_reader_paused_before_setting_its_cell_begins_again(
    live: LiveRows, reader: RowsReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RowsWriter(live)
    set_cell = live.set_cell

    def pause_before_set_cell(number: int, lowest: int, highest: int) -> None:
        monkeypatch.setattr(live, "set_cell", set_cell)
        for seq in range(1, 6):
            writer.apply(seq, [rows_of(SPECS[0], *range(300))])
        set_cell(number, lowest, highest)

    monkeypatch.setattr(live, "set_cell", pause_before_set_cell)
    assert reader.begin() == live.committed
    assert live.lowest_view_read() == live.highest_view_read() == live.committed[0]


def test_lookup_ending_while_rows_are_freed_does_not_break_the_writer(
    version: ModelVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = LiveRows(version, 20 << 10, readers=1, undo=0)
    writer, reader = RowsWriter(live), RowsReader(live, 0, version.plan)
    writer.apply(1, [rows_of(SPECS[0], *range(200))])
    view, _ = reader.begin()
    writer.apply(2, [rows_of(SPECS[0], *range(200), value=1)])
    lowest_view_read = live.lowest_view_read

    def lowest_then_end_lookup() -> int:
        lowest = lowest_view_read()
        reader.end(view)
        return lowest

    monkeypatch.setattr(live, "lowest_view_read", lowest_then_end_lookup)
    with pytest.raises(RowsFullError):
        writer.apply(3, [rows_of(SPECS[0], *range(200))])
    monkeypatch.undo()
    writer.apply(3, [rows_of(SPECS[0], *range(200))])
    assert live.seq == 3


def test_delta_that_exceeds_memory_is_not_partially_written(version: ModelVersion) -> None:
    live = LiveRows(version, 20 << 10, readers=1)
    writer = RowsWriter(live)
    before = live.last_spares.copy()
    with pytest.raises(RowsFullError):
        writer.apply(1, [rows_of(SPECS[1], 0, 3), rows_of(SPECS[0], *range(1300))])
    assert np.array_equal(live.last_spares, before)
    assert live.seq == writer.memory_bytes == 0


def test_published_rows_cannot_be_written(live: LiveRows) -> None:
    with pytest.raises(ValueError, match="read-only"):
        live.tables.data[0] = 1


def test_seq_beyond_uint32_is_rejected(live: LiveRows) -> None:
    writer = RowsWriter(live)
    with pytest.raises(StoreError, match=f"seq {NUMBER_MAX + 1} or view .* restart"):
        writer.apply(NUMBER_MAX + 1, [])


def test_more_spare_rows_than_uint32_are_rejected(version: ModelVersion) -> None:
    with pytest.raises(StoreError, match=r"1099511627776 bytes of changed rows are .* spare rows"):
        LiveRows(with_rows(version, 1 << 30), 1 << 40, 1)


def with_rows(version: ModelVersion, rows: int) -> ModelVersion:
    tables = tuple(replace(spec, num_embeddings=rows) for spec in SPECS)
    return replace(version, manifest=replace(version.manifest, tables=tables))


def test_column_wise_shards_are_merged(version: ModelVersion) -> None:
    shards = (Shard(1, 0, 7, 0, 8), Shard(0, 0, 7, 8, 4))
    tables = {**version.plan.tables, "user": TablePlan("column_wise", shards)}
    live = LiveRows(replace(version, plan=replace(version.plan, tables=tables)), 1 << 20, 1)
    plan = live.version.plan
    assert plan.tables["user"] == TablePlan("table_wise", (Shard(1, 0, 7, 0, 12),))
    assert plan.constraints["user"].sharding_types == ("table_wise",)
    assert plan.tables["movie"] == version.plan.tables["movie"]
    RowsReader(live, 0, plan)


def test_only_written_rows_are_uploaded(live: LiveRows, version: ModelVersion) -> None:
    writer, device = RowsWriter(live), FakeDevice(live, 1, version.plan)
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
    writer, device = RowsWriter(live), FakeDevice(live, 0, version.plan)
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


def test_spare_rows_of_a_group_cover_all_its_tables(grouped_version: ModelVersion) -> None:
    live = LiveRows(grouped_version, 1 << 20, 1)
    movie, user, title, maker = SHARED_SPECS
    assert [one.tables for one in live.table_groups] == [(movie, title, maker), (user,)]
    entries = live.ids.entries.num_embeddings
    assert len(live.last_spares) == movie.num_embeddings + user.num_embeddings + entries
    for number, rows in enumerate(live.rows.values(), 1):
        rows[:] = number
    for number, rows in enumerate(live.rows.values(), 1):
        assert (rows == number).all()
    assert states_equal(state_of(live.version), state_of(grouped_version))
    for group in live.table_groups:
        for spec in group.tables:
            start = live.tables.offsets[spec.name] + group.first_row * spec.row_bytes
            rows = live.tables.data[start:][: group.count * spec.row_bytes]
            assert np.array_equal(rows, live.rows[spec.name].reshape(-1))


def test_copied_rows_of_all_group_tables_count_as_memory(grouped_version: ModelVersion) -> None:
    live = LiveRows(grouped_version, 64 << 10, 1)
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


def test_spare_rows_of_a_group_run_out_before_memory(tmp_path: Path) -> None:
    specs = tuple(replace(SPECS[1], name=name) for name in ("one", "two"))
    live = LiveRows(version_of(tmp_path, specs), 1 << 20, 1)
    writer = RowsWriter(live)
    RowsReader(live, 0, live.version.plan).begin()
    for seq in range(1, 5):
        writer.apply(seq, [rows_of(specs[seq % 2], *range(7))])
    with pytest.raises(RowsFullError, match="tables 'one', 'two': 28 rows for changes, and 7 more"):
        writer.apply(5, [rows_of(specs[0], *range(7))])


def test_group_tables_with_different_sharding_are_rejected(
    grouped_version: ModelVersion,
) -> None:
    live = LiveRows(grouped_version, 1 << 20, 2)
    shards = (Shard(0, 0, 651, 0, 33), Shard(1, 651, 650, 0, 33))
    tables = {**grouped_version.plan.tables, "title": TablePlan("row_wise", shards)}
    with pytest.raises(StoreError, match="tables 'movie', 'title', 'maker': they share features"):
        RowsReader(live, 0, replace(grouped_version.plan, tables=tables))
