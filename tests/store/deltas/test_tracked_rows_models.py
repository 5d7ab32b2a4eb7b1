"""Tests of the models whose rows can be tracked, also with a delta tracker of other code."""

from typing import Any

import numpy as np
import pytest
import torch
from store.deltas.tracked_rows_helpers import (
    TRACKED,
    TRACKING_MARKS,
    apply_rows,
    ids_of,
    lost_rows,
    semi_sync_pipeline,
)
from store.deltas.tracked_training import (
    TABLES,
    USER,
    Ranker,
    batch,
    gathered,
    ranker,
    record,
    stepper,
    take_rows,
)
from torch import nn
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig
from trainer import shard_model

from embedserve_store.deltas import tracked_rows
from embedserve_store.deltas.tracked_rows import TrackedRows
from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.publishing.ranks import Ranks

pytestmark = TRACKING_MARKS


# Delta trackers that other code attached


@pytest.mark.parametrize("consumers", [[], ["own"]])
def test_tracked_collection_is_tracked_again_only_after_close(consumers: list[str]) -> None:
    """Each of two would take rows that the other never sees."""
    dmp = ranker(tables=USER)
    if consumers:
        dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=consumers))
    for _ in range(2):
        tracked = TrackedRows(dmp, Ranks())
        with pytest.raises(InvalidModelError, match=r"consumer 'embedserve:ebc' already: close"):
            TrackedRows(dmp, Ranks())
        record(dmp, "user", [3])
        assert take_rows(tracked)["user"][0].tolist() == [3]
        tracked.close()


@pytest.mark.parametrize("auto_compact", [False, True])
def test_tracker_can_be_shared_with_other_consumers(
    monkeypatch: pytest.MonkeyPatch, auto_compact: bool
) -> None:
    dmp = ranker(tables=TRACKED)
    config = DeltaTrackerConfig(consumers=["own"], auto_compact=auto_compact)
    tracker = dmp.init_torchrec_delta_tracker(config)
    tracked, served = TrackedRows(dmp, Ranks()), gathered(dmp)
    pipeline, rng = semi_sync_pipeline(dmp, monkeypatch), np.random.default_rng(0)
    batches = iter([batch(rng, TRACKED) for _ in range(26)])
    for at in range(24):
        pipeline.progress(batches)
        if at % 2:
            tracker.get_unique_ids("own")
        if at % 5 in (0, 1, 3):
            apply_rows(served, take_rows(tracked))
            assert lost_rows(served, dmp) == 0
    tracked.close()
    pipeline.progress(batches)
    assert tracker.get_unique_ids("own")


def test_batches_merged_by_the_tracker_are_taken_again() -> None:
    dmp = ranker(tables=USER)
    dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["own"], auto_compact=True))
    tracked, step = TrackedRows(dmp, Ranks(), overlap_steps=2), stepper(dmp)
    for id_ in (1, 2, 3, 4):
        step(ids_of({"user": [id_], "friend": []}))
    assert take_rows(tracked)["user"][0].tolist() == [1, 2, 3, 4]
    step(ids_of({"user": [5], "friend": []}))
    assert set(take_rows(tracked)["user"][0]) >= {3, 4, 5}
    for id_ in (6, 7):
        step(ids_of({"user": [id_], "friend": []}))
    take_rows(tracked)
    assert not {1, 2, 3, 4}.intersection(take_rows(tracked)["user"][0])


def test_two_collections_of_a_model_are_tracked_separately() -> None:
    words = {"word": (30, 4, ["word"], "table_wise")}
    both = nn.ModuleDict({"a": Ranker(tables=USER), "b": Ranker(tables=words)})
    dmp = shard_model(both, {"user": "row_wise", "word": "table_wise"})
    first, second = TrackedRows(dmp, Ranks(), "a"), TrackedRows(dmp, Ranks(), "b")
    record(dmp, "user", [3])
    record(dmp, "word", [4])
    assert [(name, taken[0].tolist()) for name, taken in take_rows(first).items()] == [
        ("user", [3])
    ]
    assert [(name, taken[0].tolist()) for name, taken in take_rows(second).items()] == [
        ("word", [4])
    ]


# Models that cannot be tracked


def test_model_without_dense_parameters_is_rejected_with_advice() -> None:
    bare = Ranker(tables=USER).ebc
    dmp = shard_model(bare, {"user": "row_wise"})
    with pytest.raises(AttributeError, match="has no attribute 'module'"):
        dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["own"]))
    with pytest.raises(InvalidModelError, match=r"no attribute 'module'\)\. Call init_data_par"):
        TrackedRows(dmp, Ranks())
    held = nn.Module()
    held.add_module("module", Ranker(tables=USER).ebc)
    dmp = shard_model(held, {"user": "row_wise"})
    tracked = TrackedRows(dmp, Ranks())
    record(dmp, "user", [3])
    assert take_rows(tracked)["user"][0].tolist() == [3]


def test_module_that_is_not_a_dmp_is_rejected() -> None:
    with pytest.raises(InvalidModelError, match="DistributedModelParallel, not in a Ranker"):
        TrackedRows(ranker(tables=USER).module, Ranks())


def test_two_tables_of_the_same_name_are_rejected_with_their_modules() -> None:
    both = nn.ModuleDict({"a": Ranker(tables=USER), "b": Ranker(tables=USER)})
    dmp = shard_model(both, {"user": "row_wise"})
    with pytest.raises(InvalidModelError, match=r"'user' is in a\.ebc and in b\.ebc, which"):
        TrackedRows(dmp, Ranks(), "a")
    assert dmp.get_delta_tracker() is None
    tracker = dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["own"]))
    assert list(tracker.table_to_fqn.values()) == ["b.ebc.embedding_bags.user"]


def test_table_named_like_a_module_is_rejected() -> None:
    tables = {"ebc": (30, 4, ["f"], "table_wise"), **USER}
    dmp = ranker(tables=tables)
    with pytest.raises(InvalidModelError, match="rename the table or the module"):
        TrackedRows(dmp, Ranks())
    tracker = dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["own"]))
    assert len(set(tracker.table_to_fqn.values())) == 1


def tables_that_share_a_feature(rows: int) -> dict[str, Any]:
    return {
        "first": (20, 4, ["f"], "table_wise"),
        "second": (rows, 4, ["f"], "table_wise"),
        **USER,
    }


def test_tables_that_share_a_feature_are_taken_whole() -> None:
    dmp = ranker(tables=tables_that_share_a_feature(30))
    tracked, tracker = TrackedRows(dmp, Ranks()), dmp.get_delta_tracker()
    dmp.module.ebc(ids_of({"f": [1], "user": [], "friend": []}))
    recorded = [fqn for fqn, found in tracker.store.per_fqn_lookups.items() if len(found[0].ids)]
    assert recorded == ["ebc.embedding_bags.first"], "TorchRec has all ids for the first"
    for _ in range(2):
        counts = {name: len(numbers) for name, (numbers, _) in take_rows(tracked).items()}
        assert counts == {"first": 20, "second": 30}


def test_large_tables_that_share_a_feature_are_rejected() -> None:
    dmp = ranker(tables=tables_that_share_a_feature(10_001))
    with pytest.raises(InvalidModelError, match=r"'second' shares a feature .* its 10001 rows"):
        TrackedRows(dmp, Ranks())
    assert dmp.get_delta_tracker() is None


def test_data_parallel_tables_are_taken_whole_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dmp = ranker()
    tracked = TrackedRows(dmp, Ranks())
    for _ in range(2):
        numbers, rows = take_rows(tracked)["country"]
        assert numbers.tolist() == list(range(12))
        assert torch.equal(rows, gathered(dmp)["country"])
    tracked.close()
    monkeypatch.setattr(tracked_rows, "WHOLE_ROWS_MAX", 11)
    with pytest.raises(InvalidModelError, match=r"'country' is data_parallel, .* 12 rows .* 11 "):
        TrackedRows(dmp, Ranks())


def test_tables_of_a_dense_kernel_are_taken_whole() -> None:
    tables = {**USER, "item": TABLES["item"]}
    sharding = {"user": "row_wise", "item": "table_wise"}
    dmp = shard_model(Ranker(tables=tables), sharding, kernels={"item": "dense"})
    tracked, served, step = TrackedRows(dmp, Ranks()), gathered(dmp), stepper(dmp)
    for _ in range(2):
        features = batch(np.random.default_rng(1), tables)
        step(features)
        taken = take_rows(tracked)
        assert taken["item"][0].tolist() == list(range(77))
        apply_rows(served, taken)
        assert lost_rows(served, dmp) == 0


@pytest.mark.parametrize("kind", ["table_row_wise", "grid_shard"])
def test_unsupported_shardings_are_rejected(kind: str) -> None:
    dmp = ranker(tables=USER)
    dmp.module.ebc.module_sharding_plan["user"].sharding_type = kind
    with pytest.raises(InvalidModelError, match=f"table 'user': touched rows of {kind} tables"):
        TrackedRows(dmp, Ranks())


def test_resharded_tables_are_rejected() -> None:
    """A rank may have recorded ids of a shard that is on another rank now."""
    dmp = ranker(tables=USER)
    tracked = TrackedRows(dmp, Ranks())
    record(dmp, "user", [3])
    dmp.module.ebc.module_sharding_plan["user"].ranks = [1]  # as after dmp.reshard()
    with pytest.raises(StoreError, match=r"the tables were resharded, .*: push before reshard"):
        take_rows(tracked)


def test_model_sharded_over_other_than_all_ranks_is_rejected() -> None:
    dmp = ranker(tables=USER)
    dmp.module.ebc._env.world_size = 2
    with pytest.raises(InvalidModelError, match="the model is sharded over 2 of 1 ranks"):
        TrackedRows(dmp, Ranks())


def test_unsupported_dtypes_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracked_rows, "SOURCE_DTYPES", ("float32", "float16"))
    with pytest.raises(InvalidModelError, match=r"table .user. has a .* of bfloat16: expected a"):
        TrackedRows(ranker(tables=USER, dtype="bfloat16"), Ranks())
