"""Tests of tracked rows: taken rows bring a copy of the tables up to date, bit for bit.

Separate tests pin down the present behaviour of TorchRec's delta tracker. They fail once TorchRec
fixes it; our workaround can then be removed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from server.python import run_warm_python
from store.deltas.tracked_training import (
    RUNS,
    TABLES,
    USER,
    Ranker,
    batch,
    dense_optimizer,
    gathered,
    out_of_memory,
    ranker,
    record,
    run,
    shard,
    stepper,
    take,
)
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync

from embedserve_store.deltas import tracked_rows
from embedserve_store.deltas.tracked_rows import TrackedRows
from embedserve_store.errors import InvalidModelError
from embedserve_store.publishing.ranks import Ranks
from embedserve_store.sources.live_dmp import asked_apart, describe_sharded

OURS = "embedserve:ebc"

TRACKED = {name: table for name, table in TABLES.items() if name != "country"}
TIMEOUT_S = 300

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning"),
]


def ids_of(bags: dict[str, list[int]]) -> KeyedJaggedTensor:
    """Returns one example with a bag of each feature."""
    return KeyedJaggedTensor(
        keys=list(bags),
        values=torch.tensor([i for ids in bags.values() for i in ids], dtype=torch.int64),
        lengths=torch.tensor([len(ids) for ids in bags.values()]),
    )


def check_takes(found: list[list[Any]]) -> None:
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
def test_ranks_take_what_training_changed(tmp_path: Path, world_size: int) -> None:
    script = Path(__file__).with_name("tracked_training.py")
    done = run_warm_python(script, str(world_size), tmp_path, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    files = (tmp_path / f"rank-{rank}.pt" for rank in range(world_size))
    ranks = [torch.load(file, weights_only=False) for file in files]
    for name in RUNS:
        check_takes([found[name] for found in ranks])
        for found in ranks:  # each rank has its columns of the rows of a column-wise table
            assert "tag" in found[name][1]
    first = -(-TABLES["user"][0] // world_size)  # of rank 1
    for rank, found in enumerate(ranks):
        assert found["rows of a wrong id"] == ([first] if rank == 1 else [])
        assert "table 'tag': ranks 0, 1" in found["refusal"]
        assert "looked up different ids of this column-wise table" in found["refusal"]
        assert found["refusal"] == ranks[0]["refusal"]
        assert found["error"] == (
            "touched rows cannot be taken on rank 1: RuntimeError: out of memory"
        )
    served, trained = ranks[0]["before"], ranks[0]["after"]
    for found in ranks:
        apply(served, found["again"])
    assert all(torch.equal(served[name], table) for name, table in trained.items())


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        (EmbOptimType.EXACT_ADAGRAD, "float32"),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, "float32"),
        (EmbOptimType.EXACT_SGD, "float16"),
    ],
)
def test_one_rank_takes_what_training_changed(optimizer: EmbOptimType, dtype: str) -> None:
    dmp = ranker(optimizer, dtype)
    tracked = TrackedRows(dmp, Ranks())
    assert tracked.tables == describe_sharded(dmp)[0]
    check_takes([run(dmp, tracked)])


def test_bfloat16_rows_are_taken_as_float32() -> None:
    dmp = ranker(dtype="bfloat16")  # FBGEMM does not train it on the CPU
    tracked = TrackedRows(dmp, Ranks())
    record(dmp, "user", [7, 3])
    record(dmp, "tag", [9])
    now, taken = gathered(dmp), take(tracked)
    for name, expected in (("user", [3, 7]), ("tag", [9])):
        numbers, rows = taken[name]
        assert numbers.tolist() == expected
        assert rows.dtype == torch.float32
        assert torch.equal(rows, now[name][numbers])


def test_taken_rows_are_copies() -> None:
    dmp = ranker()
    tracked, step = TrackedRows(dmp, Ranks()), stepper(dmp)
    step()
    taken = take(tracked)
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
    numbers, rows = take(tracked)["word"]
    assert numbers.tolist() == [3, 30]
    weights = dmp.state_dict()["ec.embeddings.word.weight"].local_shards()[0].tensor
    assert torch.equal(rows, weights[numbers])


# Lookups before the optimizer's step, by pipelines that look ahead


def semi_sync(
    dmp: DistributedModelParallel, monkeypatch: pytest.MonkeyPatch
) -> TrainPipelineSemiSync:
    """Returns TorchRec's pipeline that looks up the next batch before this batch's backward pass.

    The pipeline supports only CUDA streams; on the CPU there is one stream.
    """
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", torch.cpu.current_stream)
    cpu = torch.device("cpu")
    return TrainPipelineSemiSync(dmp, dense_optimizer(dmp), cpu, start_batch=0)


def lost_rows(served: dict[str, torch.Tensor], dmp: DistributedModelParallel) -> int:
    now = gathered(dmp)
    return sum(int((served[name] != now[name]).any(1).sum()) for name in now)


def apply(served: dict[str, torch.Tensor], taken: dict[str, Any]) -> None:
    for name, (numbers, rows) in taken.items():
        served[name][torch.from_numpy(numbers)] = rows


def test_a_pipeline_that_looks_ahead_loses_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    dmp = ranker(tables=TRACKED)
    tracked, served = TrackedRows(dmp, Ranks()), gathered(dmp)
    pipeline, rng = semi_sync(dmp, monkeypatch), np.random.default_rng(0)
    batches = iter([batch(rng, TRACKED) for _ in range(30)])
    for at in range(30):
        pipeline.progress(batches)
        if at % 3 != 1:
            apply(served, take(tracked))
            assert lost_rows(served, dmp) == 0


def test_without_overlap_a_pipeline_that_looks_ahead_loses_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dmp = ranker(tables=TRACKED)
    tracked, served = TrackedRows(dmp, Ranks(), overlap_steps=0), gathered(dmp)
    pipeline, rng = semi_sync(dmp, monkeypatch), np.random.default_rng(0)
    batches = iter([batch(rng, TRACKED) for _ in range(6)])
    for _ in range(6):
        pipeline.progress(batches)
        apply(served, take(tracked))
    assert lost_rows(served, dmp) > 0


def test_torchrec_reports_ids_at_the_lookup_and_not_after_the_update() -> None:
    dmp = ranker(tables=USER)
    tracker = dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["own"]))
    loss, _ = dmp(batch(np.random.default_rng(0), USER))
    assert tracker.get_unique_ids("own")
    before = gathered(dmp)
    loss.backward()
    assert lost_rows(before, dmp) > 0, "the rows changed after their ids were reported"
    with pytest.raises(ValueError, match="non-empty"):
        tracker.get_unique_ids("own")


@pytest.mark.parametrize("overlap_steps", [1, 2, 3])
def test_the_ids_of_the_last_steps_are_taken_once_more(overlap_steps: int) -> None:
    dmp = ranker(tables=USER)
    tracked, step = TrackedRows(dmp, Ranks(), overlap_steps=overlap_steps), stepper(dmp)
    rng, ids = np.random.default_rng(5), []
    for at in range(12):
        features = batch(rng, USER)
        step(features)
        ids.append(set(features.values().tolist()))
        expected = set().union(*ids[-1 - overlap_steps :])
        found = take(tracked).get("user", (np.empty(0),))[0]
        assert set(found.tolist()) == expected, at


def test_forwards_of_an_evaluation_count_as_no_step() -> None:
    dmp = ranker(tables=USER)
    tracked, served = TrackedRows(dmp, Ranks()), gathered(dmp)
    rng = np.random.default_rng(0)
    ahead, _ = dmp(batch(rng, USER))  # looked up, not updated
    with torch.no_grad():
        dmp(batch(rng, USER))
    dmp.eval()
    dmp(batch(rng, USER))
    dmp.train()
    apply(served, take(tracked))
    ahead.backward()
    assert lost_rows(served, dmp) > 0
    apply(served, take(tracked))
    assert lost_rows(served, dmp) == 0


def test_ids_are_taken_again_until_a_step_follows_their_lookup() -> None:
    dmp = ranker(tables=USER)
    tracked, step = TrackedRows(dmp, Ranks()), stepper(dmp)
    record(dmp, "user", [9])  # like a pipeline that begins
    for _ in range(2):
        assert take(tracked)["user"][0].tolist() == [9]
    step(ids_of({"user": [5], "friend": []}))
    assert take(tracked)["user"][0].tolist() == [5, 9]
    for _ in range(2):
        assert take(tracked)["user"][0].tolist() == [5]


def test_lookups_between_a_take_and_the_next_forward_are_taken() -> None:
    dmp = ranker(tables=USER)
    tracked = TrackedRows(dmp, Ranks())
    take(tracked)
    dmp.module.ebc(ids_of({"user": [9], "friend": [8]}))
    assert take(tracked)["user"][0].tolist() == [8, 9]


def test_torchrec_loses_lookups_between_a_read_and_the_next_forward() -> None:
    dmp = ranker(tables=USER)
    tracker = dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["own"]))
    dmp(batch(np.random.default_rng(0), USER))
    tracker.get_unique_ids("own")
    record(dmp, "user", [9])
    with pytest.raises(ValueError, match="non-empty"):
        tracker.get_unique_ids("own")


# Lookups that are tracked


def test_rows_to_take_again_are_those_of_all_calls(one_rank: None) -> None:
    dmp = ranker(tables=USER)
    tracked = TrackedRows(dmp, Ranks())
    tracked.take_again({"user": np.array([3, 5])})
    tracked.take_again({"user": np.array([5, 9])})
    tracked.take_again({})
    assert take(tracked)["user"][0].tolist() == [3, 5, 9]
    assert take(tracked) == {}


def test_nothing_looked_up_is_an_empty_result() -> None:
    dmp = ranker(tables=USER)
    tracked, step = TrackedRows(dmp, Ranks(), overlap_steps=0), stepper(dmp)
    assert take(tracked) == {}
    step()
    assert list(take(tracked)) == ["user"]
    assert take(tracked) == {}


def test_torchrec_raises_where_nothing_was_looked_up() -> None:
    dmp = ranker(tables=USER)
    tracker = dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["own"]))
    stepper(dmp)()
    tracker.get_unique_ids("own")
    with pytest.raises(ValueError, match=r"torch\.cat\(\): expected a non-empty list"):
        tracker.get_unique_ids("own")


@pytest.mark.parametrize("id_", [-2, 103, 500])
def test_for_an_id_outside_of_the_table_the_row_is_taken_that_training_changed(
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
        taken = take(tracked)
        assert taken["user"][0].tolist() == [0, 5, 7]
        apply(served, taken)
        assert lost_rows(served, dmp) == 0
    step(ids_of({"user": [9], "friend": []}))
    assert take(tracked)["user"][0].tolist() == [9]
    warned = [one.message for one in caplog.records if one.name == tracked_rows.__name__]
    assert len(warned) == 1
    assert f"table 'user': id {id_} was looked up on rank 0, whose shard has 103 rows" in warned[0]


def test_fbgemm_raises_for_the_id_minus_one() -> None:
    step = stepper(ranker(tables=USER))
    with pytest.raises(RuntimeError, match=r"out of bounds: -1, range 0 to 103"):
        step(ids_of({"user": [5, -1], "friend": []}))


def test_wrong_ids_are_dropped_where_the_shard_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    dmp = ranker(tables=USER)
    tracked = TrackedRows(dmp, Ranks())
    empty = {"user": [(103, 0, torch.empty(0, 16))]}
    monkeypatch.setattr(tracked, "_shards", lambda: empty)
    record(dmp, "user", [5])
    assert take(tracked) == {}


def test_goldens_of_the_training_model_are_not_taken() -> None:
    dmp = ranker(tables=USER)
    tracked = TrackedRows(dmp, Ranks())
    with torch.no_grad(), asked_apart(dmp) as twin:
        twin(batch(np.random.default_rng(0), USER)).values()
    assert take(tracked) == {}


# Memory that is kept


def test_taken_ids_are_freed() -> None:
    dmp = ranker(tables=TRACKED)
    tracked, step = TrackedRows(dmp, Ranks()), stepper(dmp)
    tracker = dmp.get_delta_tracker()
    for _ in range(10):
        for _ in range(3):
            step(batch(np.random.default_rng(0), TRACKED))
        take(tracked)
        assert not any(tracker.store.per_fqn_lookups.values())
        kept = tracked._ids._again
        assert all(len(lookups) <= 2 for lookups in kept.values())  # "tag" has one per step


def test_ids_of_rows_that_cannot_be_copied_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    dmp = ranker(tables=USER)
    tracked = TrackedRows(dmp, Ranks(), overlap_steps=0)
    for row in (5, 9):
        record(dmp, "user", [row])
        with monkeypatch.context() as patched:
            patched.setattr(tracked_rows, "_rows", out_of_memory)
            assert "out of memory" in tracked.take().problem
        assert not any(dmp.get_delta_tracker().store.per_fqn_lookups.values())
        assert not any(tracked._ids._again.values())
    assert take(tracked)["user"][0].tolist() == [5, 9]


def test_what_cannot_be_set_aside_is_taken_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dmp = ranker(tables=USER)
    tracked = TrackedRows(dmp, Ranks())
    record(dmp, "user", [5])
    with monkeypatch.context() as patched:
        patched.setattr(tracked._ids, "read", out_of_memory)
        tracked.set_aside()
    assert "touched rows stay on the device: RuntimeError: out of memory" in caplog.text
    assert take(tracked)["user"][0].tolist() == [5]


def test_after_close_nothing_is_recorded_and_another_can_begin() -> None:
    dmp = ranker(tables=USER)
    step = stepper(dmp)
    for _ in range(2):
        tracked, tracker = TrackedRows(dmp, Ranks()), dmp.get_delta_tracker()
        step()
        assert take(tracked)
        tracked.close()
        step()
        assert not tracker.store.per_fqn_lookups
        tracked.close()
        assert dmp.get_delta_tracker() is None


# Delta trackers that other code attached


def test_a_tracker_without_our_consumer_is_refused_with_the_way_out() -> None:
    dmp = ranker(tables=USER)
    dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["own"]))
    with pytest.raises(InvalidModelError, match=rf"for 'own' alone: add '{OURS}' to the consumers"):
        TrackedRows(dmp, Ranks())


@pytest.mark.parametrize("auto_compact", [False, True])
def test_others_may_read_the_same_tracker(
    monkeypatch: pytest.MonkeyPatch, auto_compact: bool
) -> None:
    dmp = ranker(tables=TRACKED)
    consumers = [OURS] if auto_compact else ["own", OURS]
    config = DeltaTrackerConfig(consumers=consumers, auto_compact=auto_compact)
    tracker = dmp.init_torchrec_delta_tracker(config)
    tracked, served = TrackedRows(dmp, Ranks()), gathered(dmp)
    pipeline, rng = semi_sync(dmp, monkeypatch), np.random.default_rng(0)
    batches = iter([batch(rng, TRACKED) for _ in range(24)])
    for at in range(24):
        pipeline.progress(batches)
        if not auto_compact and at % 2:
            tracker.get_unique_ids("own")
        if at % 5 in (0, 1, 3):
            apply(served, take(tracked))
            assert lost_rows(served, dmp) == 0
    tracked.close()
    assert (dmp.get_delta_tracker() is None) == auto_compact


def test_batches_that_the_tracker_merged_are_taken_once_more() -> None:
    dmp = ranker(tables=USER)
    dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=[OURS], auto_compact=True))
    tracked, step = TrackedRows(dmp, Ranks(), overlap_steps=2), stepper(dmp)
    for id_ in (1, 2, 3, 4):
        step(ids_of({"user": [id_], "friend": []}))
    assert take(tracked)["user"][0].tolist() == [1, 2, 3, 4]
    step(ids_of({"user": [5], "friend": []}))
    assert set(take(tracked)["user"][0]) >= {3, 4, 5}
    for id_ in (6, 7):
        step(ids_of({"user": [id_], "friend": []}))
    take(tracked)
    assert not {1, 2, 3, 4}.intersection(take(tracked)["user"][0])


def test_two_collections_of_a_model_are_tracked_apart() -> None:
    words = {"word": (30, 4, ["word"], "table_wise")}
    both = nn.ModuleDict({"a": Ranker(tables=USER), "b": Ranker(tables=words)})
    dmp = shard(both, {"user": "row_wise", "word": "table_wise"})
    consumers = ["embedserve:a.ebc", "embedserve:b.ebc"]
    dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=consumers))
    first, second = TrackedRows(dmp, Ranks(), "a"), TrackedRows(dmp, Ranks(), "b")
    record(dmp, "user", [3])
    record(dmp, "word", [4])
    assert [(name, taken[0].tolist()) for name, taken in take(first).items()] == [("user", [3])]
    assert [(name, taken[0].tolist()) for name, taken in take(second).items()] == [("word", [4])]


# Models that cannot be tracked


def test_a_model_without_dense_parameters_is_refused_with_the_way_out() -> None:
    bare = Ranker(tables=USER).ebc
    dmp = shard(bare, {"user": "row_wise"})
    with pytest.raises(AttributeError, match="has no attribute 'module'"):
        dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["own"]))
    with pytest.raises(InvalidModelError, match=r"no attribute 'module'\)\. Call init_data_par"):
        TrackedRows(dmp, Ranks())
    held = nn.Module()
    held.add_module("module", Ranker(tables=USER).ebc)
    dmp = shard(held, {"user": "row_wise"})
    tracked = TrackedRows(dmp, Ranks())
    record(dmp, "user", [3])
    assert take(tracked)["user"][0].tolist() == [3]


def test_a_module_that_is_no_dmp_is_refused() -> None:
    with pytest.raises(InvalidModelError, match="DistributedModelParallel, not in a Ranker"):
        TrackedRows(ranker(tables=USER).module, Ranks())


def test_two_tables_of_one_name_are_refused_with_their_modules() -> None:
    both = nn.ModuleDict({"a": Ranker(tables=USER), "b": Ranker(tables=USER)})
    dmp = shard(both, {"user": "row_wise"})
    with pytest.raises(InvalidModelError, match=r"'user' is in a\.ebc and in b\.ebc, which"):
        TrackedRows(dmp, Ranks(), "a")
    assert dmp.get_delta_tracker() is None
    tracker = dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["own"]))
    assert list(tracker.table_to_fqn.values()) == ["b.ebc.embedding_bags.user"]


def test_a_table_with_the_name_of_a_module_is_refused() -> None:
    tables = {"ebc": (30, 4, ["f"], "table_wise"), **USER}
    dmp = ranker(tables=tables)
    with pytest.raises(InvalidModelError, match="rename the table or the module"):
        TrackedRows(dmp, Ranks())
    tracker = dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["own"]))
    assert len(set(tracker.table_to_fqn.values())) == 1


def shared(rows: int) -> dict[str, Any]:
    return {
        "first": (20, 4, ["f"], "table_wise"),
        "second": (rows, 4, ["f"], "table_wise"),
        **USER,
    }


def test_tables_that_share_a_feature_are_taken_whole() -> None:
    dmp = ranker(tables=shared(30))
    tracked, tracker = TrackedRows(dmp, Ranks()), dmp.get_delta_tracker()
    dmp.module.ebc(ids_of({"f": [1], "user": [], "friend": []}))
    recorded = [fqn for fqn, found in tracker.store.per_fqn_lookups.items() if len(found[0].ids)]
    assert recorded == ["ebc.embedding_bags.first"], "TorchRec has all ids for the first"
    for _ in range(2):
        counts = {name: len(numbers) for name, (numbers, _) in take(tracked).items()}
        assert counts == {"first": 20, "second": 30}


def test_larger_tables_that_share_a_feature_are_refused() -> None:
    dmp = ranker(tables=shared(10_001))
    with pytest.raises(InvalidModelError, match=r"'second' shares a feature .* its 10001 rows"):
        TrackedRows(dmp, Ranks())
    assert dmp.get_delta_tracker() is None


def test_data_parallel_tables_are_taken_whole_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dmp = ranker()
    tracked = TrackedRows(dmp, Ranks())
    for _ in range(2):
        numbers, rows = take(tracked)["country"]
        assert numbers.tolist() == list(range(12))
        assert torch.equal(rows, gathered(dmp)["country"])
    tracked.close()
    monkeypatch.setattr(tracked_rows, "WHOLE_ROWS_MAX", 11)
    with pytest.raises(InvalidModelError, match=r"'country' is data_parallel, .* 12 rows .* 11 "):
        TrackedRows(dmp, Ranks())


def test_tables_of_a_dense_kernel_are_taken_whole() -> None:
    tables = {**USER, "item": TABLES["item"]}
    sharding = {"user": "row_wise", "item": "table_wise"}
    dmp = shard(Ranker(tables=tables), sharding, kernels={"item": "dense"})
    tracked, served, step = TrackedRows(dmp, Ranks()), gathered(dmp), stepper(dmp)
    for _ in range(2):
        features = batch(np.random.default_rng(1), tables)
        step(features)
        taken = take(tracked)
        assert taken["item"][0].tolist() == list(range(77))
        apply(served, taken)
        assert lost_rows(served, dmp) == 0


@pytest.mark.parametrize("kind", ["table_row_wise", "grid_shard"])
def test_other_shardings_are_refused(kind: str) -> None:
    dmp = ranker(tables=USER)
    dmp.module.ebc.module_sharding_plan["user"].sharding_type = kind
    with pytest.raises(InvalidModelError, match=f"table 'user': touched rows of {kind} tables"):
        TrackedRows(dmp, Ranks())


def test_a_model_over_some_of_the_ranks_is_refused() -> None:
    dmp = ranker(tables=USER)
    dmp.module.ebc._env.world_size = 2
    with pytest.raises(InvalidModelError, match="the model is sharded over 2 of 1 ranks"):
        TrackedRows(dmp, Ranks())


def test_other_dtypes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracked_rows, "SOURCE_DTYPES", ("float32", "float16"))
    with pytest.raises(InvalidModelError, match=r"table .user. has a .* of bfloat16: expected a"):
        TrackedRows(ranker(tables=USER, dtype="bfloat16"), Ranks())


def test_a_negative_overlap_is_refused() -> None:
    with pytest.raises(ValueError, match="overlap_steps is -1, expected 0 or more"):
        TrackedRows(ranker(tables=USER), Ranks(), overlap_steps=-1)
