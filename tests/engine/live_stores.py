"""Stores of models with pushed and compacted deltas, and lookups of their live rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from pooled import Tables, collection

from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.rows_writer import RowsWriter
from embedserve.engine.engine import Engine
from embedserve_store import DeltaWriter, ModelStore, ModelVersion, compact_deltas, publish
from embedserve_store.deltas.delta_line import DeltaLine
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.table_spec import DTYPES

MEMORY = 2 << 20
PUSHES = 3
GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
)


def pooled_store(
    store: Path,
    tables: Tables,
    sharding: str | Mapping[str, str],
    dtypes: Sequence[str] = DTYPES,
) -> Path:
    torch.manual_seed(7)
    source = collection(tables)
    for dtype in dtypes:
        publish(source, store, model=dtype, dtype=dtype, sharding=sharding, world_size=2)
        push_and_compact(store, dtype)
    return store


def push_and_compact(store: Path, model: str) -> None:
    random = np.random.default_rng(1)
    tables = ModelStore(store).load(model, 1).manifest.tables
    with DeltaWriter(store, model=model) as writer:
        for _ in range(PUSHES):
            changes = {}
            for table in tables:
                count = max(2, table.num_embeddings // 3)
                numbers = np.sort(random.choice(table.num_embeddings, count, replace=False))
                values = random.normal(size=(count, table.embedding_dim)).astype(np.float32)
                changes[table.name] = (numbers, values)
            writer.push_rows(changes)
    compact_deltas(store, model)


def replay(store: Path, model: str) -> LiveRows:
    live = LiveRows(ModelStore(store).load(model, 1), MEMORY, readers=1)
    apply_line(store, live, RowsWriter(live))
    return live


def apply_line(store: Path, live: LiveRows, writer: RowsWriter) -> None:
    """Applies the deltas of the line after the last seq."""
    line = DeltaLine(ModelStore(store), live.version.manifest)
    first = live.seq
    for delta, _ in line.deltas():
        writer.apply(first + delta.seq, [one for file in line.rows(delta) for one in file])


def churn(live: LiveRows, writer: RowsWriter) -> None:
    """Applies and undoes deltas of the first rows until spare rows are reused.

    The last delta has the published rows.
    """
    random = np.random.default_rng(3)
    written = 0
    for seq in range(1, 30):
        changes = []
        for table in live.version.manifest.tables:
            rows = min(100, table.num_embeddings)
            numbers = np.sort(random.choice(rows, rows // 3, replace=False))
            values = live.tables.rows(table.name)[random.permutation(numbers)]
            changes.append(ChangedRows(table, numbers, values))
        writer.apply(2 * seq, changes)
        written += max(len(change.numbers) for change in changes)
        if not seq % 6:
            assert writer.revert(2 * seq - 4, 2 * seq + 1)
            writer.finish_undo()
    assert live.peaks.sum() < written
    published = []
    for table in live.version.manifest.tables:
        numbers = np.arange(min(100, table.num_embeddings))
        published.append(ChangedRows(table, numbers, live.tables.rows(table.name)[numbers]))
    writer.apply(live.seq + 1, published)


def look_up(engine: Engine, live: LiveRows | None, weighted: bool) -> np.ndarray:
    random = np.random.default_rng(5)
    rows = engine.manifest.rows_per_feature
    lengths = random.integers(0, 5, (len(rows), 200)).astype(np.int32)
    counts = lengths.sum(axis=1, dtype=np.int64)
    ids = np.concatenate([random.integers(0, *one) for one in zip(rows, counts, strict=True)])
    weights = random.normal(size=len(ids)).astype(np.float32) if weighted else None
    if live is None:
        return engine.lookup(ids, lengths.reshape(-1), weights)
    reader = reader_of(live, engine)
    view, _ = reader.begin()
    found = engine.lookup(reader.rows_in_view(ids, counts, view), lengths.reshape(-1), weights)
    reader.end(view)
    return found


def reader_of(live: LiveRows, engine: Engine) -> RowsReader:
    upload = None if engine.spare_rows is None else engine.spare_rows.upload
    return RowsReader(live, 0, engine.plan, upload)


def compacted(store: Path, model: str) -> ModelVersion:
    return ModelStore(store).load(model, 2)
