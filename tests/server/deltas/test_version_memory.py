"""Tests of the memory of a version: processes share it until the last one releases it."""

import errno
import gc
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from server.deltas.tables import (
    by_key,
    changed,
    random_changes,
    read,
    state_of,
    states_equal,
    version_of,
)

from embedserve.config import ServeSettings
from embedserve.deltas import version_memory
from embedserve.deltas.delta_target import make_shared_state, open_shared_state
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.rows_writer import RowsWriter
from embedserve.deltas.shared_goldens import CheckedGoldens
from embedserve.deltas.status import SharedDeltaState
from embedserve.deltas.version_memory import NAME, VersionMemory
from embedserve_store import StoreError
from embedserve_store.format.delta_goldens import DeltaGoldens

SETTINGS = ServeSettings("store", delta_memory=64 << 10, workers=2, delta_undo=3)


def opened_state(folder: Path, made: SharedDeltaState) -> SharedDeltaState:
    """Returns the state that another process finds in the memory of ``made``."""
    return open_shared_state(
        SETTINGS, version_of(folder), made.live.memory.path, made.live.memory.generation
    )


def count_mappings() -> int:
    """Returns the number of mappings of memory for changed rows in this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count(f"memfd:{NAME}")


def test_opened_memory_shares_rows_readers_status_and_goldens(tmp_path: Path) -> None:
    ours = make_shared_state(SETTINGS, version_of(tmp_path), 7)
    published = state_of(ours.live.version)
    writer, random = RowsWriter(ours.live), np.random.default_rng(1)
    changes = random_changes(random, 5)
    writer.apply(1, changes)
    ours.hold.set(True)
    ours.status.stall("for the test")
    theirs = opened_state(tmp_path, ours)
    assert theirs.live.tables.data.ctypes.data != ours.live.tables.data.ctypes.data
    assert (theirs.hold.is_set, theirs.status.read().reason) == (True, "for the test")
    assert theirs.live.committed == ours.live.committed
    reader = RowsReader(theirs.live, 1, theirs.live.version.plan)
    after, later = changed(published, changes), random_changes(random, 5)
    first, _ = reader.begin()
    assert ours.live.lowest_view_read() == first
    writer.apply(2, later)
    second, seq = reader.begin()
    assert seq == 2
    for view, state in ((first, after), (second, changed(after, later))):
        assert states_equal(read(theirs.live, reader, view), by_key(theirs.live, state))
    goldens = DeltaGoldens(
        np.array([1]), np.ones((1, 1), np.int32), None, np.ones((1, 2), np.float32), "float32"
    )
    ours.goldens.write(CheckedGoldens(2, goldens, np.ones((1, 2), np.float32)))
    found_goldens = theirs.goldens.read()
    assert found_goldens is not None
    assert found_goldens.seq == 2


def test_unused_memory_is_released(tmp_path: Path) -> None:
    before, files = count_mappings(), len(os.listdir("/proc/self/fd"))
    one = make_shared_state(SETTINGS, version_of(tmp_path), 1)
    other = opened_state(tmp_path, one)
    rows = other.live.last_spares
    assert count_mappings() > before
    del one, other
    assert count_mappings() == before + 1  # the array that is left
    assert rows.sum() == 0
    del rows
    assert count_mappings() == before
    assert len(os.listdir("/proc/self/fd")) == files


def test_memory_of_another_rollout_is_not_opened() -> None:
    memory = VersionMemory.create(1)
    with pytest.raises(StoreError, match="is not the memory of rollout 2 any more"):
        VersionMemory.open(memory.path, 2)
    path = memory.path
    del memory
    gc.collect()
    with pytest.raises(StoreError, match=r"changed rows cannot be opened: .*No such"):
        VersionMemory.open(path, 1)


def test_memory_created_with_other_settings_is_rejected(tmp_path: Path) -> None:
    made = make_shared_state(SETTINGS, version_of(tmp_path), 1)
    others = replace(SETTINGS, delta_memory=640 << 10)
    with pytest.raises(StoreError, match=r"memory for changed rows has \d+ bytes, \d+ are expec"):
        open_shared_state(others, version_of(tmp_path), made.live.memory.path, 1)


def test_memory_is_created_on_kernels_without_the_noexec_seal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create, rejected_flags = os.memfd_create, []

    def made(name: str, flags: int) -> int:
        if flags & version_memory._MFD_NOEXEC_SEAL:
            rejected_flags.append(flags)
            raise OSError(errno.EINVAL, "Invalid argument")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", made)
    assert VersionMemory.create().take(8).tolist() == [0] * 8
    assert len(rejected_flags) == 1
