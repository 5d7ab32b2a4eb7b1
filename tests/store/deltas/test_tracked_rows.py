"""Tests of tracked rows: taken rows bring a copy of the tables up to date, bit for bit.

Separate tests pin down the present behaviour of TorchRec's delta tracker. They fail once TorchRec
fixes it; our workaround can then be removed.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from server.python import run_warm_python
from store.deltas.tracked_rows_helpers import TRACKED, TRACKING_MARKS, apply_rows, ids_of, lost_rows
from store.deltas.tracked_training import (
    RUNS,
    TABLES,
    USER,
    batch,
    gathered,
    raise_out_of_memory,
    ranker,
    record,
    run,
    stepper,
    take_rows,
)
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig

from embedserve_store.deltas import tracked_rows
from embedserve_store.deltas.tracked_rows import TrackedRows
from embedserve_store.publishing.ranks import Ranks
from embedserve_store.sources.live_dmp import side_effect_free_twin

TIMEOUT_S = 300

pytestmark = TRACKING_MARKS


def check_taken_rows(found: list[list[Any]]) -> None:
    """Checks the results of ``run`` on each rank."""
    served = {name: table.clone() for name, table in found[0][0].items()}
    for at in range(1, len(found[0]), 2):
        before = {name: table.clone() for name, table in served.items()}
        seen: dict[str, set[int]] = {name: set() for name in served}
        for taken in (ranks[at] for ranks in found):
            for name, (numbers, rows) in taken.items():
                assert numbers.dtype == np.int64
                assert (np.diff(numbers) > 0).all()
                assert not seen[name].intersection(numbers)
                seen[name].update(numbers)
                assert rows.device.type == "cpu"
                assert rows.dtype == served[name].dtype
                served[name][torch.from_numpy(numbers)] = rows
        now = found[0][at + 1]
        for name, table in now.items():
            assert torch.equal(served[name], table), name
            changed = (before[name] != table).any(1).nonzero().ravel().tolist()
            assert seen[name] >= set(changed)
    assert any((found[0][0][name] != found[0][-1][name]).any() for name in served)
    assert len(seen["user"]) < 50, "rows that were not touched are left out"


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_take_the_rows_that_training_changed(tmp_path: Path, world_size: int) -> None:
    script = Path(__file__).with_name("tracked_training.py")
    done = run_warm_python(script, str(world_size), tmp_path, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    files = (tmp_path / f"rank-{rank}.pt" for rank in range(world_size))
    ranks = [torch.load(file, weights_only=False) for file in files]
    for name in RUNS:
        check_taken_rows([found[name] for found in ranks])
        for found in ranks:  # each rank has its columns of the rows of a column-wise table
            assert "tag" in found[name][1]
    first = -(-TABLES["user"][0] // world_size)  # of rank 1
    for rank, found in enumerate(ranks):
        assert found["rows of an invalid id"] == ([first] if rank == 1 else [])
        assert "table 'tag': ranks 0, 1" in found["column-wise error"]
        assert "looked up different ids of this column-wise table" in found["column-wise error"]
        assert found["column-wise error"] == ranks[0]["column-wise error"]
        assert found["error"] == (
            "touched rows cannot be taken on rank 1: RuntimeError: out of memory"
        )
    served, trained = ranks[0]["before"], ranks[0]["after"]
    for found in ranks:
        apply_rows(served, found["again"])
    assert all(torch.equal(served[name], table) for name, table in trained.items())


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        (EmbOptimType.EXACT_ADAGRAD, "float32"),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, "float32"),
        (EmbOptimType.EXACT_SGD, "float16"),
    ],
)
def test_single_rank_takes_the_rows_that_training_changed(
    optimizer: EmbOptimType, dtype: str
) -> None:
    dmp = ranker(optimizer, dtype)
    tracked = TrackedRows(dmp, Ranks())
    check_taken_rows([run(dmp, tracked)])


def test_bfloat16_rows_are_taken_as_float32() -> None:
    dmp = ranker(dtype="bfloat16")  # FBGEMM does not train it on the CPU
    tracked = TrackedRows(dmp, Ranks())
    record(dmp, "user", [7, 3])
    record(dmp, "tag", [9])
    now, taken = gathered(dmp), take_rows(tracked)
    for name, expected in (("user", [3, 7]), ("tag", [9])):
        numbers, rows = taken[name]
        assert numbers.tolist() == expected
        assert rows.dtype == torch.float32
        assert torch.equal(rows, now[name][numbers])


def test_taken_rows_are_copies() -> None:
    dmp = ranker()
    tracked, step = TrackedRows(dmp, Ranks()), stepper(dmp)
    step()
    taken = take_rows(tracked)
    kept = {name: rows.clone() for name, (_, rows) in taken.items()}
    for _ in range(4):
        step()
    assert all(torch.equal(kept[name], rows) for name, (_, rows) in taken.items())


def test_an_embedding_collection_is_tracked() -> None:
    config = EmbeddingConfig(
        name="word", num_embeddings=40, embedding_dim=4, feature_names=["word"]
    )
    dmp = DistributedModelParallel(
        nn.ModuleDict({"ec": EmbeddingCollection(tables=[config]), "over": nn.Linear(4, 1)}),
        device=torch.device("cpu"),
    )
    tracked = TrackedRows(dmp, Ranks())
    dmp.module["ec"](ids_of({"word": [3, 30, 3]}))["word"].values()
    numbers, rows = take_rows(tracked)["word"]
    assert numbers.tolist() == [3, 30]
    weights = dmp.state_dict()["ec.embeddings.word.weight"].local_shards()[0].tensor
    assert torch.equal(rows, weights[numbers])


def test_negative_overlap_steps_is_rejected() -> None:
    with pytest.raises(ValueError, match="overlap_steps is -1, expected 0 or more"):
        TrackedRows(ranker(tables=USER), Ranks(), overlap_steps=-1)


# Lookups that are tracked


def test_take_again_accumulates_rows_over_calls(one_rank: None) -> None:
    dmp = ranker(tables=USER)
    tracked = TrackedRows(dmp, Ranks())
    tracked.take_again({"user": np.array([3, 5])})
    tracked.take_again({"user": np.array([5, 9])})
    tracked.take_again({})
    assert take_rows(tracked)["user"][0].tolist() == [3, 5, 9]
    assert take_rows(tracked) == {}


def test_take_without_lookups_returns_nothing() -> None:
    dmp = ranker(tables=USER)
    tracked, step = TrackedRows(dmp, Ranks(), overlap_steps=0), stepper(dmp)
    assert take_rows(tracked) == {}
    step()
    assert list(take_rows(tracked)) == ["user"]
    assert take_rows(tracked) == {}


def test_torchrec_raises_if_nothing_was_looked_up() -> None:
    dmp = ranker(tables=USER)
    tracker = dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["own"]))
    stepper(dmp)()
    tracker.get_unique_ids("own")
    with pytest.raises(ValueError, match=r"torch\.cat\(\): expected a non-empty list"):
        tracker.get_unique_ids("own")


@pytest.mark.parametrize("id_", [-2, 103, 500])
def test_id_outside_the_table_takes_the_row_that_training_changed(
    id_: int, caplog: pytest.LogCaptureFixture
) -> None:
    """FBGEMM looks up row 0. For int32 ids it corrects only a copy, which the tracker does not
    see."""
    dmp = ranker(tables=USER)
    tracked, step = TrackedRows(dmp, Ranks(), overlap_steps=0), stepper(dmp)
    served = gathered(dmp)
    for _ in range(2):
        wrong = KeyedJaggedTensor(
            keys=["user", "friend"],
            values=torch.tensor([5, id_, 7], dtype=torch.int32),
            lengths=torch.tensor([3, 0], dtype=torch.int32),
        )
        step(wrong)
        taken = take_rows(tracked)
        assert taken["user"][0].tolist() == [0, 5, 7]
        apply_rows(served, taken)
        assert lost_rows(served, dmp) == 0
    step(ids_of({"user": [9], "friend": []}))
    assert take_rows(tracked)["user"][0].tolist() == [9]
    warned = [one.message for one in caplog.records if one.name == tracked_rows.__name__]
    assert len(warned) == 1
    assert f"table 'user': id {id_} was looked up on rank 0, whose shard has 103 rows" in warned[0]


def test_fbgemm_raises_for_id_minus_one() -> None:
    step = stepper(ranker(tables=USER))
    with pytest.raises(RuntimeError, match=r"out of bounds: -1, range 0 to 103"):
        step(ids_of({"user": [5, -1], "friend": []}))


def test_ids_are_dropped_if_the_shard_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    dmp = ranker(tables=USER)
    tracked = TrackedRows(dmp, Ranks())
    empty = {"user": [(103, 0, torch.empty(0, 16))]}
    monkeypatch.setattr(tracked, "_shards", lambda: empty)
    record(dmp, "user", [5])
    assert take_rows(tracked) == {}


def test_lookups_of_goldens_are_not_tracked() -> None:
    dmp = ranker(tables=USER)
    tracked = TrackedRows(dmp, Ranks())
    with torch.no_grad(), side_effect_free_twin(dmp) as twin:
        twin(batch(np.random.default_rng(0), USER)).values()
    assert take_rows(tracked) == {}


# Memory that is kept


def test_taken_ids_are_freed() -> None:
    dmp = ranker(tables=TRACKED)
    tracked, step = TrackedRows(dmp, Ranks()), stepper(dmp)
    tracker = dmp.get_delta_tracker()
    for _ in range(10):
        for _ in range(3):
            step(batch(np.random.default_rng(0), TRACKED))
        take_rows(tracked)
        assert not any(tracker.store.per_fqn_lookups.values())
        kept = tracked._ids._again
        assert all(len(lookups) <= 2 for lookups in kept.values())  # "tag" has one per step


def test_ids_are_freed_if_their_rows_cannot_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    dmp = ranker(tables=USER)
    tracked = TrackedRows(dmp, Ranks(), overlap_steps=0)
    for row in (5, 9):
        record(dmp, "user", [row])
        with monkeypatch.context() as patched:
            patched.setattr(tracked_rows, "_rows", raise_out_of_memory)
            assert "out of memory" in tracked.take().problem
        assert not any(dmp.get_delta_tracker().store.per_fqn_lookups.values())
        assert not any(tracked._ids._again.values())
    assert take_rows(tracked)["user"][0].tolist() == [5, 9]


def test_rows_are_taken_later_if_set_aside_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dmp = ranker(tables=USER)
    tracked = TrackedRows(dmp, Ranks())
    record(dmp, "user", [5])
    with monkeypatch.context() as patched:
        patched.setattr(tracked._ids, "read", raise_out_of_memory)
        tracked.set_aside()
    assert "touched rows stay on the device: RuntimeError: out of memory" in caplog.text
    assert take_rows(tracked)["user"][0].tolist() == [5]


def test_close_stops_recording_and_allows_a_new_tracker() -> None:
    dmp = ranker(tables=USER)
    step = stepper(dmp)
    for _ in range(2):
        tracked, tracker = TrackedRows(dmp, Ranks()), dmp.get_delta_tracker()
        step()
        assert take_rows(tracked)
        tracked.close()
        step()
        assert not tracker.store.per_fqn_lookups
        tracked.close()
        assert dmp.get_delta_tracker() is None
