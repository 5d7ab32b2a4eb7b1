"""Tests of live rows between processes: writers that are killed, and readers that are stopped."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from server.deltas.tables import SHARED_SPECS, SPECS, version_of

from embedserve.deltas.changed_rows_memory import RowsFullError
from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.rows_writer import RowsWriter
from embedserve.deltas.version_memory import VersionMemory
from embedserve_store import ModelVersion
from embedserve_store.format.delta_file import ChangedRows

CHANGED_MAX = 300
"""Maximum rows of a table that each delta changes."""
KILLS = 25
MEMORY = 96 << 10
READERS = 2


@pytest.fixture(scope="module", params=[SPECS, SHARED_SPECS])
def version(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ModelVersion:
    return version_of(tmp_path_factory.mktemp("live"), request.param)


@contextlib.contextmanager
def process(run: Callable[[], None]) -> Iterator[int]:
    """Runs ``run`` in a forked process, which is killed at the end of the block."""
    pid = os.fork()
    if not pid:
        try:
            run()
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def delta(live: LiveRows, seq: int) -> list[ChangedRows]:
    """Returns the same rows for each ``seq``; every byte of them is that of ``seq``."""
    changes = []
    for spec in live.version.manifest.tables:
        count = min(CHANGED_MAX, spec.num_embeddings)
        values = np.full((count, spec.row_bytes), seq % 256, np.uint8)
        changes.append(ChangedRows(spec, np.arange(count), values))
    return changes


def write_forever(live: LiveRows) -> None:
    writer = RowsWriter(live)
    while True:
        with contextlib.suppress(RowsFullError):
            writer.apply(live.seq + 1, delta(live, live.seq + 1))


def do_nothing() -> None:
    return None


def read_once(
    live: LiveRows, reader: RowsReader, stop: Callable[[], None] = do_nothing
) -> tuple[int, bool]:
    """Returns the seq of a lookup, and whether it read the rows of that delta. Calls ``stop``
    between its steps."""
    view, seq = reader.begin()
    stop()
    manifest = live.version.manifest
    counts = np.minimum(manifest.rows_per_feature, CHANGED_MAX)
    numbers = reader.rows_in_view(np.concatenate([np.arange(n) for n in counts]), counts, view)
    stop()
    parts = np.split(numbers, np.cumsum(counts)[:-1])
    found = []
    for column in manifest.columns:
        size = column.table.row_bytes
        start = live.tables.offsets[column.table.name]
        at = start + parts[column.feature][:, None] * size + np.arange(size)
        found.append((live.tables.data[at] == seq % 256).all())
    reader.end(view)
    return seq, all(found)


def test_lookups_see_exactly_one_delta_while_writers_are_killed(
    version: ModelVersion,
) -> None:
    live = LiveRows(version, MEMORY, READERS)
    RowsWriter(live).apply(1, delta(live, 1))
    # For each reader: the number of its lookups, and the seq of a wrong one.
    found = VersionMemory.create().take(16 * READERS).view(np.uint64).reshape(READERS, 2)

    def read_forever(number: int) -> None:
        reader = RowsReader(live, number, version.plan)
        while True:
            seq, is_right = read_once(live, reader)
            if not is_right:
                found[number, 1] = seq
            found[number, 0] += 1

    with process(lambda: read_forever(0)), process(lambda: read_forever(1)):
        for kill in range(KILLS):
            seq, reads = live.seq, found[:, 0].copy()
            with process(lambda: write_forever(live)):
                while live.seq < seq + 3 or (found[:, 0] <= reads).any():
                    time.sleep(0.001)
                time.sleep(random.Random(kill).uniform(0, 0.003))
    assert found[:, 1].tolist() == [0] * READERS
    assert (found[:, 0] >= KILLS).all()
    assert live.seq >= 3 * KILLS


def test_stopped_lookup_still_reads_the_rows_of_its_delta(version: ModelVersion) -> None:
    """Checks that spare rows, which run out meanwhile, are used again after the lookup has
    ended."""
    live = LiveRows(version, MEMORY, 1)
    writer = RowsWriter(live)
    writer.apply(1, delta(live, 1))
    found = VersionMemory.create().take(16).view(np.uint64)

    def read() -> None:
        reader = RowsReader(live, 0, version.plan)
        found[:] = read_once(live, reader, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        signal.pause()

    with process(read) as pid:
        for _ in range(2):  # before the rows are found, and before they are read
            os.waitpid(pid, os.WUNTRACED)
            seq = write_until_full(live, writer)
            os.kill(pid, signal.SIGCONT)
        while not found[0]:
            time.sleep(0.001)
        assert found.tolist() == [1, 1]
        assert seq > 1
        writer.apply(seq + 1, delta(live, seq + 1))


def write_until_full(live: LiveRows, writer: RowsWriter) -> int:
    """Writes deltas until they do not fit; returns the seq of the last."""
    with contextlib.suppress(RowsFullError):
        for _ in range(1000):
            writer.apply(live.seq + 1, delta(live, live.seq + 1))
        raise AssertionError("the memory does not run full")
    return live.seq
