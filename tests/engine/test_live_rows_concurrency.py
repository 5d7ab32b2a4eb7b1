"""Tests of lookups of live rows while a writer applies and undoes deltas."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from engine.live_stores import GPU, reader_of
from pooled import collection
from torchrec import PoolingType

from embedserve.deltas.changed_rows_memory import RowsFullError
from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.rows_writer import RowsWriter
from embedserve.engine.restore import restore
from embedserve_store import ModelStore, publish
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.table_spec import TableSpec

WAIT_S_MAX = 300.0


@pytest.mark.parametrize("devices", ["cpu:1", pytest.param("cuda", marks=GPU)])
def test_concurrent_lookups_return_the_rows_of_their_seq(tmp_path: Path, devices: str) -> None:
    """Checks threads that look up while a writer applies and undoes deltas.

    Spare rows are reused many times.
    """
    rows, dim = 5000, 8
    source = collection([(name, rows, dim, [name], PoolingType.SUM) for name in "ab"])
    publish(source, tmp_path, model="m", dtype="float32")
    version = ModelStore(tmp_path).load("m")
    live = LiveRows(version, 2 << 20, readers=1, undo=4)
    engine = restore(live.version, devices, live=live)
    reader = reader_of(live, engine)
    always_changed, ended = np.arange(200), threading.Event()
    value_of = {0: np.nan}
    found: list[set[int]] = [set() for _ in range(3)]

    def look_up_repeatedly(seqs: set[int]) -> None:
        random = np.random.default_rng()
        while not ended.is_set():
            ids = np.concatenate([random.choice(always_changed, 300) for _ in "ab"])
            view, seq = reader.begin()
            try:
                numbers = reader.rows_in_view(ids, np.array([300, 300]), view)
                values = engine.lookup(numbers, np.ones(600, np.int32))
            finally:
                reader.end(view)
            if seq:
                assert np.unique(values).tolist() == [value_of[seq]]
            seqs.add(seq)

    def upload_repeatedly() -> None:
        while not ended.wait(0.001):
            reader.advance()

    writer, random = RowsWriter(live), np.random.default_rng(3)
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(look_up_repeatedly, seqs) for seqs in found]
        uploads = threads.submit(upload_repeatedly)
        try:
            for seq in range(1, 10_000):
                is_enough = seq >= 400 and all(len(seqs) > 20 for seqs in found)
                if is_enough or any(one.done() for one in running):
                    break
                target = seq - int(random.integers(1, 4))
                if seq % 7 == 0 and target >= 1:
                    value_of[seq] = value_of[target]
                    if writer.revert(target, seq):
                        writer.finish_undo()
                        continue
                value_of[seq] = float(seq)
                rows_of = [
                    changed_rows_of(t, seq, always_changed, random) for t in version.manifest.tables
                ]
                apply_with_retries(writer, seq, rows_of)
        finally:
            ended.set()
        for one in (*running, uploads):
            one.result()
    assert all(len(seqs) > 20 for seqs in found)
    assert 0 < live.peaks.sum() < 100_000  # more than 300,000 rows were written


def apply_with_retries(writer: RowsWriter, seq: int, changes: Sequence[ChangedRows]) -> None:
    """Applies changes like a follower does: retries while a slow lookup keeps older rows."""
    ends_s = time.monotonic() + WAIT_S_MAX
    while True:
        try:
            writer.apply(seq, changes)
        except RowsFullError:
            assert time.monotonic() < ends_s
            time.sleep(0.001)
        else:
            return


def changed_rows_of(
    table: TableSpec, seq: int, always_changed: np.ndarray, random: np.random.Generator
) -> ChangedRows:
    """Returns rows of ``table``, with those of ``always_changed``, whose values are all ``seq``."""
    some = random.choice(table.num_embeddings, int(random.integers(1, 500)))
    numbers = np.unique(np.concatenate([always_changed, some]))
    values = np.full((len(numbers), table.row_bytes // 4), seq, np.float32)
    return ChangedRows(table, numbers, values.view(np.uint8))
