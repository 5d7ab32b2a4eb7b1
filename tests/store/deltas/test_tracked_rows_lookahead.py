"""Tests of tracked rows with lookups before the optimizer's step, by pipelines that look ahead.

Tests with "torchrec" in their names pin down the present behaviour of TorchRec's delta tracker.
They fail once TorchRec fixes it; our workaround can then be removed.
"""

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
from store.deltas.tracked_training import USER, batch, gathered, ranker, record, stepper, take_rows
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig

from embedserve_store.deltas.tracked_rows import TrackedRows
from embedserve_store.publishing.ranks import Ranks

pytestmark = TRACKING_MARKS


def test_lookahead_pipeline_loses_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    dmp = ranker(tables=TRACKED)
    tracked, served = TrackedRows(dmp, Ranks()), gathered(dmp)
    pipeline, rng = semi_sync_pipeline(dmp, monkeypatch), np.random.default_rng(0)
    batches = iter([batch(rng, TRACKED) for _ in range(30)])
    for at in range(30):
        pipeline.progress(batches)
        if at % 3 != 1:
            apply_rows(served, take_rows(tracked))
            assert lost_rows(served, dmp) == 0


def test_lookahead_pipeline_loses_updates_without_overlap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dmp = ranker(tables=TRACKED)
    tracked, served = TrackedRows(dmp, Ranks(), overlap_steps=0), gathered(dmp)
    pipeline, rng = semi_sync_pipeline(dmp, monkeypatch), np.random.default_rng(0)
    batches = iter([batch(rng, TRACKED) for _ in range(6)])
    for _ in range(6):
        pipeline.progress(batches)
        apply_rows(served, take_rows(tracked))
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


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("overlap_steps", [1, 2, 3])
def test_ids_of_the_last_overlap_steps_are_taken_again(overlap_steps: int, is_shared: bool) -> None:
    dmp = ranker(tables=USER)
    if is_shared:
        dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["own"]))
    tracked, step = TrackedRows(dmp, Ranks(), overlap_steps=overlap_steps), stepper(dmp)
    rng, ids = np.random.default_rng(5), []
    for at in range(12):
        features = batch(rng, USER)
        step(features)
        ids.append(set(features.values().tolist()))
        expected = set().union(*ids[-1 - overlap_steps :])
        found = take_rows(tracked).get("user", (np.empty(0),))[0]
        assert set(found.tolist()) == expected, at


def test_evaluation_forwards_do_not_count_as_steps() -> None:
    dmp = ranker(tables=USER)
    tracked, served = TrackedRows(dmp, Ranks()), gathered(dmp)
    rng = np.random.default_rng(0)
    ahead, _ = dmp(batch(rng, USER))  # looked up, not updated
    with torch.no_grad():
        dmp(batch(rng, USER))
    dmp.eval()
    dmp(batch(rng, USER))
    dmp.train()
    apply_rows(served, take_rows(tracked))
    ahead.backward()
    assert lost_rows(served, dmp) > 0
    apply_rows(served, take_rows(tracked))
    assert lost_rows(served, dmp) == 0


@pytest.mark.parametrize("is_shared", [False, True])
def test_ids_are_taken_again_until_a_step_follows_their_lookup(is_shared: bool) -> None:
    dmp = ranker(tables=USER)
    if is_shared:
        dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["own"]))
    tracked, step = TrackedRows(dmp, Ranks()), stepper(dmp)
    record(dmp, "user", [9])  # like a pipeline that begins
    for _ in range(2):
        assert take_rows(tracked)["user"][0].tolist() == [9]
    step(ids_of({"user": [5], "friend": []}))
    assert take_rows(tracked)["user"][0].tolist() == [5, 9]
    for _ in range(2):
        assert take_rows(tracked)["user"][0].tolist() == [5]


def test_lookups_between_a_take_and_the_next_forward_are_taken() -> None:
    dmp = ranker(tables=USER)
    tracked = TrackedRows(dmp, Ranks())
    take_rows(tracked)
    dmp.module.ebc(ids_of({"user": [9], "friend": [8]}))
    assert take_rows(tracked)["user"][0].tolist() == [8, 9]


def test_torchrec_loses_lookups_between_a_read_and_the_next_forward() -> None:
    dmp = ranker(tables=USER)
    tracker = dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["own"]))
    dmp(batch(np.random.default_rng(0), USER))
    tracker.get_unique_ids("own")
    record(dmp, "user", [9])
    with pytest.raises(ValueError, match="non-empty"):
        tracker.get_unique_ids("own")
