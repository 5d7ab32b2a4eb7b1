"""Tests of resident tables of a model that follows deltas: the file's rows lie in memory at the
same addresses, before the rows that change."""

import ctypes
import faulthandler
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from server.deltas.tables import (
    SHARED_SPECS,
    SPECS,
    by_key,
    changed,
    random_changes,
    read,
    state_of,
    states_equal,
    version_of,
)

from embedserve.config import ServeSettings
from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.rows_writer import RowsWriter
from embedserve.deltas.status import SharedDeltaState
from embedserve.processes import model_loading
from embedserve.processes.model_loading import make_resident_and_verify
from embedserve_store import ModelVersion, StoreError
from embedserve_store.memory.resident_tables import HUGE_PAGE_BYTES, huge_page_bytes

MEMORY = 256 << 10


@pytest.fixture
def version(tmp_path: Path) -> ModelVersion:
    return version_of(tmp_path, SHARED_SPECS)


@pytest.fixture
def live(version: ModelVersion) -> LiveRows:
    return LiveRows(version, MEMORY, readers=1)


def test_resident_rows_keep_their_addresses_and_ignore_the_file(
    live: LiveRows, version: ModelVersion
) -> None:
    before = state_of(version)
    addresses = {spec.name: live.tables.rows(spec.name).ctypes.data for spec in SHARED_SPECS}
    resident = live.make_resident()
    assert resident is live.version
    assert not resident.tables.is_mapped
    with version.tables.path.open("r+b") as file:
        file.write(bytes(version.tables.path.stat().st_size))
    for spec in SHARED_SPECS:
        rows = resident.tables.rows(spec.name)
        assert rows.ctypes.data == addresses[spec.name]
        assert np.array_equal(rows, before[spec.name])
        assert not version.tables.rows(spec.name).any()
    resident.tables.check_unchanged()  # nothing reads the file


def test_deltas_are_applied_and_undone_in_resident_tables(
    live: LiveRows, version: ModelVersion
) -> None:
    live.undo = 1
    states = [state_of(version)]
    live.make_resident()
    writer, reader = RowsWriter(live), RowsReader(live, 0, live.version.plan)
    random = np.random.default_rng(4)
    for seq in range(1, 20):
        changes = random_changes(random, 100, SHARED_SPECS)
        writer.apply(seq, changes)
        states.append(changed(states[-1], changes))
        found = read(live, reader, live.committed[0])
        assert states_equal(found, by_key(live, states[-1]))
    assert writer.revert(18, 20)
    found = read(live, reader, live.committed[0])
    assert states_equal(found, by_key(live, states[-2]))


def test_write_to_a_published_row_kills_the_process(live: LiveRows) -> None:
    live.make_resident()
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.memset(live.tables.rows("user").ctypes.data, 0, 1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGSEGV


def test_progress_counts_only_bytes_of_tables(live: LiveRows, version: ModelVersion) -> None:
    reports: list[tuple[str, int, int, int]] = []
    live.make_resident(lambda *report: reports.append(report))
    assert [report[0] for report in reports] == list(version.tables.offsets)
    assert all(done == total for _, done, total, _ in reports)
    assert reports[-1][-1] == version.manifest.nbytes


def test_truncated_tables_file_is_named_in_the_error(live: LiveRows, version: ModelVersion) -> None:
    path = version.tables.path
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(StoreError, match=r"tables\.safetensors: ends within its tables"):
        live.make_resident()


def test_lack_of_memory_raises_a_store_error(
    live: LiveRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("embedserve.deltas.live_rows.map_private", full)
    with pytest.raises(StoreError, match=r"cannot be resident: \[Errno 12\] Cannot allocate"):
        live.make_resident()


def test_server_makes_followed_versions_resident_in_place(
    live: LiveRows, version: ModelVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServeSettings(store="store", deltas="follow", tables="resident")
    followed = {"shop": SharedDeltaState(live)}
    monkeypatch.setattr(model_loading, "available_bytes", lambda: version.manifest.nbytes)
    versions = make_resident_and_verify(settings, {"shop": live.version}, followed)
    assert versions == {"shop": live.version}
    assert not live.tables.is_mapped
    monkeypatch.setattr(model_loading, "available_bytes", lambda: version.manifest.nbytes - 1)
    with pytest.raises(StoreError, match=f"{version.manifest.nbytes} bytes of tables cannot be"):
        make_resident_and_verify(settings, {"shop": live.version}, followed)


def test_huge_pages_are_counted_in_every_table(tmp_path: Path) -> None:
    rows = 2 * HUGE_PAGE_BYTES // SPECS[1].row_bytes
    specs = tuple(replace(SPECS[1], name=name, num_embeddings=rows) for name in ("one", "two"))
    live = LiveRows(version_of(tmp_path, specs), MEMORY, readers=1)
    assert huge_page_bytes([live.version]) == 0
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    is_never = not enabled.exists() or "[never]" in enabled.read_text()
    found = huge_page_bytes([live.make_resident()])
    assert found == 0 if is_never else found % HUGE_PAGE_BYTES == 0
    if found:
        assert found >= 2 * HUGE_PAGE_BYTES
