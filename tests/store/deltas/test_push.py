"""Tests of DeltaWriter.push: after each push the store has the rows of training, bit for bit."""

from pathlib import Path
from traceback import walk_tb

import numpy as np
import pytest
import torch
from server.python import run_warm_python
from store.deltas.conftest import line_of
from store.deltas.tracked_training import USER, batch, gathered, ranker, stepper
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from embedserve_store import (
    Bags,
    DeltaWriter,
    InvalidModelError,
    ModelStore,
    RevertedError,
    TableSpec,
    WriterFencedError,
    compact_deltas,
    publish,
    publish_sharded,
    undo_deltas,
)
from embedserve_store.deltas import pushed_goldens
from embedserve_store.errors import GoldensError
from embedserve_store.format.delta_manifest import DeltaManifest
from embedserve_store.format.row_layout import dequantize_rows
from embedserve_store.goldens.delta_parity import check_delta_goldens
from embedserve_store.goldens.reference_pooling import RowsOf

TIMEOUT_S = 300

pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning"),
]


@pytest.mark.parametrize("mode", ["", "thread"])
def test_stored_rows_equal_trained_rows_after_each_push(tmp_path: Path, mode: str) -> None:
    """Trains on two ranks with every sharding type. One push fails, and the next push has its rows.
    All deltas are undone before the last push, which has all undone rows. In the mode "thread",
    training changes rows before they are written."""
    script, store = Path(__file__).with_name("training_pushes.py"), tmp_path / "store"
    done = run_warm_python(script, "2", store, tmp_path, mode, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    models = ModelStore(store)
    base = models.load("m", 1)
    line = line_of(store)
    tables = {name: base.tables.rows(name).copy() for name in base.tables.tables}
    published = {name: table.copy() for name, table in tables.items()}
    push_count = 0
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
        assert (delta.goldens is None) == (delta.step == 3)
        if delta.goldens is not None:
            assert delta.goldens.dtype == "float32"
            check_delta_goldens(delta.goldens, base.manifest, rows_in(tables), "delta")
            if delta.step == 0:  # the goldens differ before and after
                with pytest.raises(GoldensError):
                    check_delta_goldens(delta.goldens, base.manifest, rows_in(before), "delta")
        assert any((before[name] != tables[name]).any() for name in tables) == (delta.step != 2)
        push_count += 1
    assert push_count == 4
    compacted = compact_deltas(store, "m")
    for name, table in tables.items():
        np.testing.assert_array_equal(models.load("m", compacted.version).tables.rows(name), table)


def rows_in(tables: dict[str, np.ndarray]) -> RowsOf:
    """Returns the function that reads rows of ``tables``, stored bytes by name."""

    def rows_of(table: TableSpec, numbers: np.ndarray) -> np.ndarray:
        return dequantize_rows(tables[table.name][numbers], table.dtype, table.embedding_dim)

    return rows_of


def row_numbers(store: Path, seq: int) -> dict[str, set[int]]:
    """Returns the row numbers in a delta, by table."""
    line = line_of(store)
    files = line.rows(line.manifest(seq)[0])
    return {one.table.name: {*one.numbers.tolist()} for changes in files for one in changes}


def test_lookup_of_goldens_does_not_count_as_training(
    store: Path, tmp_path: Path, one_rank: None
) -> None:
    """Neither the tracker nor the next step counts the lookup of goldens as a step of training."""
    dmp = ranker()
    publish_sharded(dmp, tmp_path, model="m")
    step = stepper(dmp)
    step()
    with DeltaWriter(tmp_path, model="m", module=dmp) as writer:
        step()
        before = gathered(dmp)
        writer.push(goldens=batch(np.random.default_rng(5)))
        for name, table in gathered(dmp).items():
            assert torch.equal(table, before[name])
        writer.push()  # has the rows of the last step again
        first, second = (row_numbers(tmp_path, seq) for seq in (1, 2))
        assert second.keys() == first.keys()
        assert all(second[table] <= first[table] for table in second)
        with pytest.raises(InvalidModelError, match=r"numbers\[0\] is 103, feature 'user' has 103"):
            writer.push(goldens=Bags(np.array([103]), np.eye(6, 1, dtype=np.int32), None))
        step()


@pytest.mark.parametrize(
    ("goldens", "reason"),
    [
        (
            Bags(np.array([103]), np.eye(2, 1, dtype=np.int32), None),
            r"numbers\[0\] is 103, feature 'user' has 103",
        ),
        (Bags(np.array([1]), np.eye(1, dtype=np.int32), None), r"expected \[n\] and \[2 features"),
    ],
)
def test_invalid_goldens_are_not_looked_up(
    tmp_path: Path,
    one_rank: None,
    monkeypatch: pytest.MonkeyPatch,
    goldens: Bags,
    reason: str,
) -> None:
    """A row that a table does not have would end the process of a GPU."""
    monkeypatch.setattr(pushed_goldens, "_trained_answers", None)
    dmp = ranker(tables=USER)
    publish_sharded(dmp, tmp_path, model="m")
    with (
        DeltaWriter(tmp_path, model="m", module=dmp) as writer,
        pytest.raises(InvalidModelError, match=reason),
    ):
        writer.push(goldens=goldens)


def test_goldens_of_varying_batch_sizes_are_rejected(tmp_path: Path, one_rank: None) -> None:
    dmp = ranker(tables=USER)
    publish_sharded(dmp, tmp_path, model="m")
    bags = KeyedJaggedTensor(
        keys=["user", "friend"],
        values=torch.tensor([5, 7]),
        lengths=torch.tensor([1, 0, 1]),
        stride_per_key_per_rank=[[1], [2]],
        inverse_indices=(["user", "friend"], torch.tensor([[0, 0], [0, 1]])),
    )
    with (
        DeltaWriter(tmp_path, model="m", module=dmp) as writer,
        pytest.raises(InvalidModelError, match=r"goldens have 1 to 2 bags by feature: .* \(VBE\)"),
    ):
        writer.push(goldens=bags)


def test_goldens_of_a_model_with_other_keys_are_rejected(tmp_path: Path, one_rank: None) -> None:
    dmp = ranker(tables=USER)
    weights = {"ebc.embedding_bags.user.weight": torch.zeros(103, 16)}
    tables = [TableSpec("user", 103, 16, ("user",), "sum", "float32")]
    publish(weights, tmp_path, model="m", tables=tables)
    with (
        DeltaWriter(tmp_path, model="m", module=dmp) as writer,
        pytest.raises(InvalidModelError, match=r"the keys of the model in training: .*friend"),
    ):
        writer.push(goldens=Bags(np.array([1]), np.ones((1, 1), np.int32), None))


def test_model_with_other_tables_is_rejected(store: Path, one_rank: None) -> None:
    dmp = ranker(tables=USER)
    with pytest.raises(InvalidModelError, match=r"table '(user|item|tag)' is .* in version 1"):
        DeltaWriter(store, model="m", module=dmp)


def test_push_after_two_undos_has_the_rows_of_both_undos(tmp_path: Path, one_rank: None) -> None:
    dmp = ranker(tables=USER)
    store = tmp_path / "store"
    publish_sharded(dmp, store, model="m")
    line = line_of(store)

    def pushed_rows(delta: DeltaManifest) -> list[int]:
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
    assert pushed_rows(first) != pushed_rows(second)
    assert pushed_rows(last) == sorted({*pushed_rows(first), *pushed_rows(second)})


def test_pushes_that_fail_to_start_leave_no_ids_on_the_device(
    tmp_path: Path, one_rank: None
) -> None:
    """Tries pushes after an undo and with goldens that do not fit. The next push has their rows."""
    dmp = ranker(tables=USER)
    publish_sharded(dmp, tmp_path, model="m")
    wrong = Bags(np.array([103]), np.eye(2, 1, dtype=np.int32), None)
    with DeltaWriter(tmp_path, model="m", module=dmp, overlap_steps=0) as writer:
        step = stepper(dmp)
        writer.push()
        undo_deltas(tmp_path, "m", to=0, why="CTR fell")
        with pytest.raises(RevertedError):
            writer.push()
        for row in (2, 3, 500):  # id 500 looks up row 0
            step(user_bag(row))
            with pytest.raises(RevertedError):
                writer.push()
            assert not has_ids_on_the_device(dmp)
        writer.resume()
        step(user_bag(7))
        with pytest.raises(InvalidModelError, match="feature 'user' has 103"):
            writer.push(goldens=wrong)
        assert not has_ids_on_the_device(dmp)
        assert row_numbers(tmp_path, writer.push()) == {"user": {0, 2, 3, 7}}
        step(user_bag(9))
        assert row_numbers(tmp_path, writer.push()) == {"user": {9}}


def test_undo_error_keeps_no_frames_of_earlier_pushes(tmp_path: Path, one_rank: None) -> None:
    """Each push raises a new exception. A stored one would keep the locals of all earlier
    pushes."""
    dmp = ranker(tables=USER)
    publish_sharded(dmp, tmp_path, model="m")
    with DeltaWriter(tmp_path, model="m", module=dmp) as writer:
        writer.push()
        undo_deltas(tmp_path, "m", to=0, why="CTR fell")
        errors = []
        for _ in range(4):
            with pytest.raises(RevertedError, match="CTR fell") as caught:
                writer.push()
            errors.append(caught.value)
        assert [error.reverts_to for error in errors] == [0] * 4
        assert len({id(error) for error in errors}) == 4
        depths = [len([*walk_tb(error.__traceback__)]) for error in errors[1:]]
        assert len(set(depths)) == 1


def user_bag(row: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["user", "friend"],
        values=torch.tensor([row], dtype=torch.int32),
        lengths=torch.tensor([1, 0], dtype=torch.int32),
    )


def has_ids_on_the_device(dmp: DistributedModelParallel) -> bool:
    lookups = dmp.get_delta_tracker().store.per_fqn_lookups
    return any(len(one.ids) for own in lookups.values() for one in own)


@pytest.mark.parametrize("is_threaded", [False, True])
def test_fenced_writer_stops_tracking(tmp_path: Path, one_rank: None, is_threaded: bool) -> None:
    dmp = ranker(tables=USER)
    publish_sharded(dmp, tmp_path, model="m")
    with DeltaWriter(tmp_path, model="m", module=dmp) as writer:
        step = stepper(dmp)
        with DeltaWriter(tmp_path, model="m") as other:
            other.push_rows({})
        step()
        if is_threaded:
            writer.push(wait=False)
        with pytest.raises(WriterFencedError):
            writer.push()
        assert dmp.get_delta_tracker() is None
        step()
        with pytest.raises(WriterFencedError):
            writer.push()


def test_push_needs_a_module(store: Path) -> None:
    with DeltaWriter(store, model="m") as writer, pytest.raises(ValueError, match="module="):
        writer.push()
