"""Tests of DeltaWriter with ids whose rows training names, adds, moves and removes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from store.deltas.conftest import failing_writes, ids_of, last_of, numbers_of
from store.deltas.tracked_training import USER, batch, ranker, stepper
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from embedserve_store import (
    Bags,
    DeltaWriter,
    IdRule,
    InvalidModelError,
    RevertedError,
    StoreError,
    publish_sharded,
    undo_deltas,
)
from embedserve_store.deltas import line_appender
from embedserve_store.errors import UnreachableError
from embedserve_store.format.changed_ids import REMOVED


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def dmp(store: Path, one_rank: None) -> DistributedModelParallel:
    """Returns a model of 103 users, published as "m"; ids 0 to 99 have the rows 0 to 99."""
    dmp, vocabulary = ranker(tables=USER), {n: n for n in range(100)}
    rule = {"user": IdRule("map")}
    publish_sharded(dmp, store, model="m", ids=rule, vocabularies={"user": vocabulary})
    return dmp


@pytest.fixture
def writer(store: Path, dmp: DistributedModelParallel) -> Iterator[DeltaWriter]:
    with DeltaWriter(store, model="m", module=dmp) as one:
        yield one


def vocabulary_entry(user: int, row: int) -> dict[str, Any]:
    return {"user": ([user], [row])}


def test_training_chooses_the_rows_of_its_ids(
    store: Path, writer: DeltaWriter, dmp: DistributedModelParallel
) -> None:
    stepper(dmp)(batch(np.random.default_rng(0), USER))
    moved = np.array([1000, 5]), torch.tensor([100, 101])
    writer.push(vocabulary={"user": moved}, removed={"user": [50, 51]})
    assert ids_of(store) == {1000: 100, 5: 101, 50: REMOVED, 51: REMOVED}
    assert numbers_of(store)
    writer.push(vocabulary={"user": moved})  # changes nothing
    assert not last_of(store).ids
    undo_deltas(store, "m", to=0, why="")
    writer.resume()
    writer.push(vocabulary={"user": ([1000], [50])})
    assert ids_of(store) == {1000: 50, 5: 101, 50: REMOVED, 51: REMOVED}
    for rows_of, message in (
        ([103], "id 7 has row 103, the table has 103 rows"),
        ([1, 2], r"table 'user': vocabulary: rows are int64 \[2\], expected integers \[1\]"),
        ([1.5], r"vocabulary: rows are float64 \[1\], expected integers \[1\]"),
    ):
        with pytest.raises(InvalidModelError, match=message):
            writer.push(vocabulary={"user": ([7], rows_of)})
    with pytest.raises(InvalidModelError, match="id 60 is given twice"):
        writer.push(vocabulary={"user": ([60], [7])}, removed={"user": [60]})


def test_id_moved_by_a_push_with_a_lost_response_can_move_back(
    store: Path, writer: DeltaWriter
) -> None:
    with (
        failing_writes(writer, ".json", is_written=True),
        pytest.raises(StoreError, match="the store is away"),
    ):
        writer.push(vocabulary=vocabulary_entry(7, 100))
    writer.push(vocabulary=vocabulary_entry(7, 7))
    assert ids_of(store) == {7: 7}


@pytest.mark.parametrize("wait", [True, False])
def test_ids_of_a_failed_push_are_in_the_next_push(
    store: Path, writer: DeltaWriter, wait: bool
) -> None:
    moved: Any = {"user": ([7, 1000], [100, 101])}
    options: Any = {"vocabulary": moved, "removed": {"user": [8]}, "wait": wait}

    def push() -> None:
        writer.push(**options)
        writer.wait()

    with failing_writes(writer, ".json"), pytest.raises(StoreError, match="the store is away"):
        push()
    writer.push(vocabulary={"user": ([1000], [102])})
    assert ids_of(store) == {7: 100, 1000: 102, 8: REMOVED}
    writer.push()
    assert not last_of(store).ids


def test_ids_are_in_the_next_push_after_any_kind_of_failure(
    store: Path, writer: DeltaWriter, dmp: DistributedModelParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(
            line_appender.LineAppender,
            "changed_ids",
            Mock(side_effect=UnreachableError("timed out")),
        )
        with pytest.raises(UnreachableError, match="timed out"):
            writer.push(vocabulary=vocabulary_entry(1000, 100), removed={"user": [8]})
    ids, lengths = torch.tensor([3]), torch.tensor([1, 0])
    stepper(dmp)(KeyedJaggedTensor(["user", "friend"], ids, lengths=lengths))
    (sharded,) = dmp.module.ebc.state_dict().values()
    weight = sharded.local_shards()[0].tensor.detach()
    trained = weight[3].clone()
    weight[3] = torch.nan
    with pytest.raises(InvalidModelError, match="row 3 "):
        writer.push(vocabulary=vocabulary_entry(1001, 101), removed={"user": [9]})
    weight[3] = trained
    bags = Bags(np.array([103]), np.array([[1], [0]], np.int32), None)
    with pytest.raises(InvalidModelError, match=r"numbers\[0\] is 103"):
        writer.push(vocabulary=vocabulary_entry(1002, 102), goldens=bags)
    with pytest.raises(InvalidModelError, match="id 1003 has row 103"):
        writer.push(vocabulary=vocabulary_entry(1003, 103))
    writer.push(
        vocabulary=vocabulary_entry(1001, 8), removed={"user": [1000]}
    )  # id 1000 had no row yet
    assert ids_of(store) == {1001: 8, 1002: 102, 8: REMOVED, 9: REMOVED}
    assert numbers_of(store) == [3]
    undo_deltas(store, "m", to=0, why="")
    for user, row in ((1001, 100), (1003, 8)):
        with pytest.raises(RevertedError):
            writer.push(vocabulary=vocabulary_entry(user, row))
    writer.resume()
    writer.push()
    assert ids_of(store) == {1001: 100, 1002: 102, 1003: 8, 8: REMOVED, 9: REMOVED}


def test_id_moved_back_by_failed_pushes_is_not_a_change(store: Path, writer: DeltaWriter) -> None:
    """Two pushes fail. The first moves the id, the second moves it back."""
    with failing_writes(writer, ".json"):
        for row in (100, 7):
            with pytest.raises(StoreError, match="the store is away"):
                writer.push(vocabulary=vocabulary_entry(7, row))
    writer.push()
    assert not last_of(store).ids


def test_undone_ids_do_not_replace_ids_of_a_later_push(store: Path, writer: DeltaWriter) -> None:
    """Otherwise an evicted id and the id that got its row would share it."""
    writer.push(vocabulary=vocabulary_entry(1000, 100))
    undo_deltas(store, "m", to=0, why="")
    with pytest.raises(RevertedError):
        writer.push(vocabulary=vocabulary_entry(1001, 100), removed={"user": [1000]})
    writer.resume()
    writer.push()
    assert ids_of(store) == {1001: 100}


def test_ids_undone_twice_keep_their_last_rows(store: Path, writer: DeltaWriter) -> None:
    writer.push(vocabulary=vocabulary_entry(1000, 100))
    writer.push(vocabulary=vocabulary_entry(1000, 101))
    for to in (1, 0):
        undo_deltas(store, "m", to=to, why="")
        writer.resume()
    writer.push()
    assert ids_of(store) == {1000: 101}
