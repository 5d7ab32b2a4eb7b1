"""Live rows between processes: writers that are killed, and readers that stand still."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from server.deltas.tables import SPECS, version_of

from embedserve.deltas.live_rows import LiveRows, RowsFullError
from embedserve.deltas.region import shared_memory
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.rows_writer import RowsWriter
from embedserve_store import ModelVersion
from embedserve_store.format.delta_file import ChangedRows

CHANGED = {"movie": 300, "user": 7}
KILLS = 25
READERS = 2


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> ModelVersion:
    return version_of(tmp_path_factory.mktemp("live"))


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


def delta(seq: int) -> list[ChangedRows]:
    """Returns the same rows for each ``seq``, which is their every word."""
    return [
        ChangedRows(
            spec,
            np.arange(CHANGED[spec.name]),
            np.full((CHANGED[spec.name], spec.row_bytes // 4), seq, np.uint32).view(np.uint8),
        )
        for spec in SPECS
    ]


def write_on(live: LiveRows) -> None:
    writer = RowsWriter(live)
    while True:
        with contextlib.suppress(RowsFullError):
            writer.apply(live.seq + 1, delta(live.seq + 1))


def nothing() -> None:
    return None


def read_once(
    live: LiveRows, reader: RowsReader, stop: Callable[[], None] = nothing
) -> tuple[int, np.ndarray]:
    """Returns the seq of a lookup, and all words that it read. Calls ``stop`` between its steps."""
    view, seq = reader.begin()
    stop()
    counts = np.array([CHANGED["movie"], CHANGED["movie"], CHANGED["user"]])
    numbers = reader.newest(np.concatenate([np.arange(n) for n in counts]), counts, view)
    stop()
    words = []
    parts = np.split(numbers, np.cumsum(counts)[:-1])
    for part, table in zip(parts, ("movie", "movie", "user"), strict=True):
        size = live.spares[table].table.row_bytes
        at = live.tables.offsets[table] + part[:, None] * size + np.arange(size)
        words.append(live.tables.data[at].view(np.uint32).reshape(-1))
    reader.end(view)
    return seq, np.concatenate(words)


def test_no_lookup_sees_two_deltas_whatever_instruction_a_writer_is_killed_at(
    version: ModelVersion,
) -> None:
    live = LiveRows(version, 96 << 10, READERS)
    RowsWriter(live).apply(1, delta(1))
    # For each reader: its lookups, and the seq of one that was wrong.
    found = shared_memory(16 * READERS).view(np.uint64).reshape(READERS, 2)

    def read_on(number: int) -> None:
        reader = RowsReader(live, number, version.plan)
        while True:
            seq, words = read_once(live, reader)
            if not (words == seq).all():
                found[number, 1] = seq
            found[number, 0] += 1

    with process(lambda: read_on(0)), process(lambda: read_on(1)):
        for kill in range(KILLS):
            seq, reads = live.seq, found[:, 0].copy()
            with process(lambda: write_on(live)):
                while live.seq < seq + 3 or (found[:, 0] <= reads).any():
                    time.sleep(0.001)
                time.sleep(random.Random(kill).uniform(0, 0.003))
    assert found[:, 1].tolist() == [0] * READERS
    assert (found[:, 0] >= KILLS).all()
    assert live.seq >= 3 * KILLS


def test_a_lookup_that_stands_still_reads_what_it_began_with(version: ModelVersion) -> None:
    """Spare rows run out meanwhile, and are used again once it has ended."""
    live = LiveRows(version, 96 << 10, 1)
    writer = RowsWriter(live)
    writer.apply(1, delta(1))
    found = shared_memory(16).view(np.uint64)

    def read() -> None:
        reader = RowsReader(live, 0, version.plan)
        seq, words = read_once(live, reader, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        found[:] = seq, (words == seq).all()
        signal.pause()

    with process(read) as pid:
        seq = 1
        for _ in range(2):  # before the rows are found, and before they are read
            os.waitpid(pid, os.WUNTRACED)
            seq = write_until_full(writer, seq)
            os.kill(pid, signal.SIGCONT)
        while not found[0]:
            time.sleep(0.001)
        assert found.tolist() == [1, 1]
        assert seq > 1
        writer.apply(seq + 1, delta(seq + 1))


def write_until_full(writer: RowsWriter, seq: int) -> int:
    """Writes deltas after ``seq`` until they do not fit; returns the seq of the last."""
    with contextlib.suppress(RowsFullError):
        for _ in range(1000):
            writer.apply(seq + 1, delta(seq + 1))
            seq += 1
        raise AssertionError("the memory does not run full")
    return seq
