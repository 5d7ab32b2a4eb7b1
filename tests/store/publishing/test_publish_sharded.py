"""Tests of a publish by the ranks of a training job: all succeed, however slow one is, or all
fail."""

from pathlib import Path

import pytest
from server.python import run_warm_python

from embedserve_store.local_store import LocalStore


def outcomes(folder: Path, case: str) -> list[str]:
    """Returns the outcome of each of two ranks in a job whose process group has a timeout of one
    second."""
    script = Path(__file__).with_name("publishing_ranks.py")
    done = run_warm_python(script, folder, case)
    assert done.returncode == 0, done.stderr[-4000:]
    return [(folder / f"outcome-{rank}").read_text() for rank in range(2)]


@pytest.mark.parametrize("late", ["publishing", "saving"])
def test_ranks_wait_longer_than_the_process_group_timeout(tmp_path: Path, late: str) -> None:
    assert outcomes(tmp_path, late) == ["1", "none"]
    assert LocalStore(tmp_path / "store").versions("m") == [1]


def test_results_that_ranks_round_for_each_other_are_compared_unrounded(tmp_path: Path) -> None:
    assert outcomes(tmp_path, "rounding") == ["1", "none"]


def test_replicas_of_a_model_are_published_once(tmp_path: Path) -> None:
    assert outcomes(tmp_path, "replicas") == ["1", "none"]
    plan = LocalStore(tmp_path / "store").load("m").plan
    assert (plan.world_size, plan.tables["user"].sharding_type) == (1, "table_wise")


def test_all_ranks_raise_if_one_rank_cannot_write_the_store(tmp_path: Path) -> None:
    rejection = "StoreError: cannot be written on rank 1"
    assert outcomes(tmp_path, "unwritable") == [rejection, rejection]
    assert not (tmp_path / "store").exists()


def test_all_ranks_raise_if_the_disk_of_one_rank_is_full(tmp_path: Path) -> None:
    """torch's own error is no Exception: it would end a training job that only logs StoreErrors."""
    ranks = outcomes(tmp_path, "full")
    for outcome in ranks:
        assert outcome.startswith(f"NoRoomError: {tmp_path}/store/m/.staging-")
        assert outcome.endswith(": rank 1 cannot save its shards: No space left on device")
    assert not (tmp_path / "store" / "m").exists()
