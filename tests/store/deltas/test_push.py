"""DeltaWriter.push: what the store has after each push is what training has, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from server.python import run_warm_python
from store.deltas.tracked_training import USER, batch, ranker, stepper

from embedserve_store import (
    DeltaLine,
    DeltaWriter,
    InvalidModelError,
    ModelStore,
    RevertedError,
    compact_deltas,
    publish_sharded,
    undo_deltas,
)
from embedserve_store.format.delta_manifest import DeltaManifest
from embedserve_store.format.row_layout import dequantize_rows

TIMEOUT_S = 300

pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning"),
]


def test_the_store_follows_training(tmp_path: Path) -> None:
    """Two ranks, all shardings; one push fails, and its rows come with the next one. All deltas are
    undone before the last push, which has all rows that were undone."""
    script, store = Path(__file__).with_name("training_pushes.py"), tmp_path / "store"
    done = run_warm_python(script, "2", store, tmp_path, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    models = ModelStore(store)
    base = models.load("m", 1)
    line = DeltaLine(models, base.manifest)
    tables = {name: base.tables.rows(name).copy() for name in base.tables.tables}
    published = {name: table.copy() for name, table in tables.items()}
    pushed = 0
    for delta, _ in line.deltas():
        if delta.reverts_to == 0:
            assert any((published[name] != tables[name]).any() for name in tables)
            tables = {name: table.copy() for name, table in published.items()}
            continue
        before = {name: table.copy() for name, table in tables.items()}
        for changes in line.rows(delta):
            for change in changes:
                tables[change.table.name][change.numbers] = change.values
        trained = torch.load(tmp_path / f"{delta.seq}.pt", weights_only=True)
        for name, spec in base.tables.tables.items():
            found = dequantize_rows(tables[name], spec.dtype, spec.embedding_dim)
            np.testing.assert_array_equal(found, trained[name].numpy())
        assert any((before[name] != tables[name]).any() for name in tables) == (delta.step != 2)
        pushed += 1
    assert pushed == 4
    compacted = compact_deltas(store, "m")
    for name, table in tables.items():
        np.testing.assert_array_equal(models.load("m", compacted.version).tables.rows(name), table)


def test_a_model_of_other_tables_is_refused(store: Path, one_rank: None) -> None:
    dmp = ranker(tables=USER)
    with pytest.raises(InvalidModelError, match=r"table '(user|item|tag)' is .* in version 1"):
        DeltaWriter(store, model="m", module=dmp)


def test_a_push_after_two_undos_has_the_rows_of_both(tmp_path: Path, one_rank: None) -> None:
    dmp = ranker(tables=USER)
    store = tmp_path / "store"
    publish_sharded(dmp, store, model="m")
    models = ModelStore(store)
    line = DeltaLine(models, models.manifest("m"))

    def pushed(delta: DeltaManifest) -> list[int]:
        return [int(row) for (change,) in line.rows(delta) for row in change.numbers]

    with DeltaWriter(store, model="m", module=dmp, overlap_steps=0) as writer:
        step, rng = stepper(dmp), np.random.default_rng(0)
        for _ in range(2):
            step(batch(rng, USER))
            writer.push()
        undo_deltas(store, "m", to=1, why="")
        writer.resume()
        undo_deltas(store, "m", to=0, why="")
        with pytest.raises(RevertedError):
            writer.push()
        writer.resume()
        writer.resume()
        assert writer.push() == 5
    first, second, *_, last = (delta for delta, _ in line.deltas())
    assert pushed(first) != pushed(second)
    assert pushed(last) == sorted({*pushed(first), *pushed(second)})


def test_push_needs_a_module(store: Path) -> None:
    with DeltaWriter(store, model="m") as writer, pytest.raises(ValueError, match="module="):
        writer.push()
