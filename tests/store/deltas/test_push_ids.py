"""Tests of DeltaWriter with ids that training adds, moves and removes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from server.python import run_warm_python
from store.deltas.conftest import DIMS, rows
from store.deltas.tracked_training import USER, batch, ranker, stepper
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from embedserve_store import (
    Bags,
    DeltaLine,
    DeltaWriter,
    IdRule,
    InvalidModelError,
    ModelStore,
    RevertedError,
    StoreError,
    TableSpec,
    compact_deltas,
    publish,
    publish_sharded,
    undo_deltas,
)
from embedserve_store.commands.deltas import list_deltas, verify_deltas
from embedserve_store.deltas import delta_line, line_appender
from embedserve_store.deltas.append import append
from embedserve_store.errors import UnreachableError
from embedserve_store.format import changed_ids, delta_file
from embedserve_store.format.changed_ids import REMOVED
from embedserve_store.format.delta_file import repeated_row
from embedserve_store.format.delta_manifest import DeltaManifest

COUNTS = {"user": 300, "item": 77, "tag": 16}
TIMEOUT_S = 300


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Returns a store with "m": 300 users, three of them with ids, 77 items with string ids, and
    tags."""
    folder = tmp_path / "own"
    rules = {"user": IdRule("map"), "item": IdRule("map", id_type="string"), "tag": IdRule()}
    tables = [
        TableSpec(name, COUNTS[name], DIMS[name], (name,), "sum", "float32", ids=rule)
        for name, rule in rules.items()
    ]
    weights = {
        f"ebc.embedding_bags.{name}.weight": torch.zeros(COUNTS[name], DIMS[name]) for name in DIMS
    }
    vocabularies: dict[str, Any] = {"user": [100, 200, 300], "item": ["a", "b"]}
    publish(weights, folder, model="m", tables=tables, vocabularies=vocabularies)
    return folder


def line_of(store: Path) -> DeltaLine:
    models = ModelStore(store)
    return DeltaLine(models, models.manifest("m", 1))


def last_of(store: Path) -> DeltaManifest:
    line = line_of(store)
    return line.manifest(line.seqs()[-1])[0]


def ids_of(store: Path, table: str = "user") -> dict[int, int]:
    """Returns the changed ids of the last delta."""
    change = line_of(store).ids(last_of(store))[table]
    return dict(zip(change.ids.tolist(), change.rows.tolist(), strict=True))


def numbers_of(store: Path) -> list[int]:
    return [int(n) for (change,) in line_of(store).rows(last_of(store)) for n in change.numbers]


def test_a_new_id_gets_a_row_with_its_values(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DeltaWriter(store, model="m") as writer:
        writer.push_rows({"user": ([7, 200, 5], rows("user", 3))}, removed={"user": [100]})
        assert ids_of(store) == {5: 3, 7: 4, 100: REMOVED}
        assert numbers_of(store) == [1, 3, 4]
        writer.push_rows({"user": ([5, 8], rows("user", 2))}, removed={"user": np.array([7])})
        assert ids_of(store) == {8: 5, 7: REMOVED}
        assert numbers_of(store) == [3, 5]
        writer.push_rows({"user": (torch.tensor([5]), torch.from_numpy(rows("user", 1)))})
        assert not last_of(store).ids
    list_deltas(str(store), "m", 1, None, 10)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["user", "3", "2", "1"] in printed
    verify_deltas(str(store), "m", None, None)


def test_strings_and_tables_without_a_vocabulary(store: Path) -> None:
    with DeltaWriter(store, model="m") as writer:
        writer.push_rows(
            {"item": (["c", "a"], rows("item", 2)), "tag": ([3], rows("tag", 1))},
            removed={"item": ["b"]},
        )
        assert sorted(ids_of(store, "item").values()) == [REMOVED, 2]
        for name, said in (("tag", "has no vocabulary"), ("more", "is not in the model; tables")):
            with pytest.raises(InvalidModelError, match=f"table '{name}' {said}"):
                writer.push_rows({}, removed={name: [3]})
        with pytest.raises(InvalidModelError, match="id 3 is not a string"):
            writer.push_rows({}, removed={"item": [3]})


@pytest.mark.parametrize(
    ("pushed", "removed", "said"),
    [
        ([7, 100], [100], r"table 'user': ids\[1\] is 100, which is removed in the same delta"),
        ([], [7], "table 'user': id 7 is removed, but is not in the vocabulary"),
        ([], [100, 100], "table 'user': id 100 is given twice"),
        ([7, 7], [], "table 'user': row 3 is pushed twice"),
        ([*range(1000, 1298)], [], "298 new ids, but only 297 rows without an id: remove ids"),
    ],
)
def test_ids_that_cannot_change_are_named_and_nothing_is_pushed(
    store: Path, pushed: list[int], removed: list[int], said: str
) -> None:
    with DeltaWriter(store, model="m") as writer:
        with pytest.raises(InvalidModelError, match=said):
            writer.push_rows(
                {"user": (pushed, rows("user", len(pushed)))}, removed={"user": removed}
            )
        assert not line_of(store).seqs()
        writer.push_rows({"user": ([7], rows("user", 1))})
    assert ids_of(store) == {7: 3}


def test_a_push_that_fails_gives_no_row(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DeltaWriter(store, model="m") as writer:
        with monkeypatch.context() as failing:

            def fail(*_: Any) -> None:
                raise StoreError("the disk is full")

            failing.setattr(line_appender, "append", fail)
            with pytest.raises(StoreError, match="the disk is full"):
                writer.push_rows({"user": ([7], rows("user", 1))}, removed={"user": [100]})
        writer.push_rows({"user": ([8, 100], rows("user", 2))})
        assert ids_of(store) == {8: 3}


def test_ids_of_a_push_above_the_limits_come_with_its_last_delta(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_file, "PART_BYTES", 64)  # one row of a user
    monkeypatch.setattr(line_appender, "DELTA_BYTES_MAX", 10_000)  # room for two files
    with DeltaWriter(store, model="m") as writer:
        assert writer.push_rows({"user": ([7, 8, 100, 200], rows("user", 4))}) == 3
    line = line_of(store)
    assert [len(delta.rows) for delta, _ in line.deltas()] == [1, 1, 0]
    assert [len(delta.ids) for delta, _ in line.deltas()] == [0, 0, 1]
    assert ids_of(store) == {7: 3, 8: 4}
    monkeypatch.setattr(line_appender, "DELTA_BYTES_MAX", 4_000)  # less than one file
    with DeltaWriter(store, model="m") as writer:
        files = {*(store / "m/deltas/1").iterdir()}
        with pytest.raises(InvalidModelError, match="the changed ids of a push are 4112 bytes in"):
            writer.push_rows({"user": ([9], rows("user", 1))})
        assert {*(store / "m/deltas/1").iterdir()} == files


def test_ids_in_several_files_are_compared_once(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_ids, "_PART_IDS", 1)
    with DeltaWriter(store, model="m") as writer:
        writer.push_rows({"user": ([9, 7, 8], rows("user", 3))}, removed={"user": [200]})
    line, compared = line_of(store), []
    ((delta, _),) = line.deltas()
    files = [file for file in delta.files if file.ids]
    assert len(files) == 4

    def compare(*ids: Any) -> int | None:
        compared.append(len(ids))
        return repeated_row(*ids)

    monkeypatch.setattr(delta_line, "repeated_row", compare)
    user = line.ids(replace(delta, files=tuple(reversed(files))))["user"]
    assert user.ids.tolist() == [7, 8, 9, 200]
    assert user.rows.tolist() == [3, 4, 5, REMOVED]
    assert compared == [4]
    twice = replace(delta, files=(*files, files[0]))
    with pytest.raises(StoreError, match=r"0001\.json: table 'user': id 7 is in two of its files"):
        line.ids(twice)


def lose_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes pushes fail after the store has their deltas."""

    def lose(*arguments: Any) -> None:
        append(*arguments)
        raise UnreachableError("timed out")

    monkeypatch.setattr(line_appender, "append", lose)


@pytest.mark.parametrize("again", [False, True])
def test_ids_of_a_push_whose_response_was_lost_are_known_to_the_next(
    store: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    with DeltaWriter(store, model="m") as writer:
        with monkeypatch.context() as losing:
            lose_responses(losing)
            lost: Any = {"user": ([7], rows("user", 1))}
            with pytest.raises(UnreachableError, match="timed out"):
                writer.push_rows(lost, removed={"user": [100]})
        if again:
            assert writer.push_rows(lost, removed={"user": [100]}) == 2
            assert not last_of(store).ids
            assert numbers_of(store) == [3]
        writer.push_rows({"user": ([8, 100], rows("user", 2))})
        assert ids_of(store) == {8: 4, 100: 5}
        assert numbers_of(store) == [4, 5]
        changed = line_of(store).ids_at(writer.seq)["user"]
    assert dict(zip(changed.ids.tolist(), changed.rows.tolist(), strict=True)) == {
        7: 3,
        8: 4,
        100: 5,
    }


def test_a_push_that_arrives_late_gives_no_row_twice(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store writes the first delta only while the second push is in flight."""
    with DeltaWriter(store, model="m") as writer:
        late: list[Any] = []

        def delay(*arguments: Any) -> Any:
            if not late:
                late.append(arguments)
                raise UnreachableError("timed out")
            if len(late) == 1:
                late.append(append(*late[0]))
            return append(*arguments)

        monkeypatch.setattr(line_appender, "append", delay)
        with pytest.raises(UnreachableError, match="timed out"):
            writer.push_rows({"user": ([7], rows("user", 1))})
        with pytest.raises(UnreachableError, match=r"an earlier push .* has arrived meanwhile"):
            writer.push_rows({"user": ([8], rows("user", 1))})
        assert writer.push_rows({"user": ([8], rows("user", 1))}) == 2
    assert ids_of(store) == {8: 4}


def test_an_id_that_moved_in_a_push_whose_response_was_lost_moves_back(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    with DeltaWriter(folder, model="m", module=published(folder)) as writer:
        with monkeypatch.context() as losing:
            lose_responses(losing)
            with pytest.raises(UnreachableError, match="timed out"):
                writer.push(vocabulary=placed(7, 100))
        writer.push(vocabulary=placed(7, 7))
    assert ids_of(folder) == {7: 7}


def test_the_next_writer_knows_the_ids_of_the_line(store: Path) -> None:
    with DeltaWriter(store, model="m") as writer:
        writer.push_rows({"user": ([7], rows("user", 1))}, removed={"user": [100]})
    for _ in range(2):  # from version 1, then from the compacted one
        with DeltaWriter(store, model="m") as writer:
            writer.push_rows({"user": ([7, 9], rows("user", 2))})
            assert ids_of(store) == {9: 0}  # the row of id 100
            writer.push_rows({}, removed={"user": [9]})
        compact_deltas(store, "m")


def test_after_an_undo_ids_are_as_before(store: Path) -> None:
    with DeltaWriter(store, model="m") as writer:
        writer.push_rows({"user": ([7], rows("user", 1))})
        writer.push_rows({"user": ([8], rows("user", 1))}, removed={"user": [7]})
        undo_deltas(store, "m", to=1, why="")
        writer.resume()
        writer.push_rows({"user": ([9, 7], rows("user", 2))})
        assert ids_of(store) == {9: 4}
        assert numbers_of(store) == [3, 4]


def test_goldens_may_have_ids_of_the_same_push(store: Path) -> None:
    lengths = np.array([[2], [0], [0]], np.int32)
    values = rows("user", 2)
    with DeltaWriter(store, model="m") as writer:
        bags = Bags(np.array([7, 100]), lengths, None)
        answers = np.zeros((1, sum(DIMS.values())), np.float32)
        writer.push_rows({"user": ([7, 100], values)}, goldens=(bags, answers))
        goldens = last_of(store).goldens
        assert goldens is not None
        assert goldens.numbers.tolist() == [3, 0]
        with pytest.raises(InvalidModelError, match="id 8 is not in the vocabulary"):
            writer.push_rows({}, goldens=(Bags(np.array([7, 8]), lengths, None), answers))


def published(folder: Path) -> DistributedModelParallel:
    """Returns a model of 103 users, published as "m"; ids 0 to 99 have the rows 0 to 99."""
    dmp, vocabulary = ranker(tables=USER), {n: n for n in range(100)}
    rule = {"user": IdRule("map")}
    publish_sharded(dmp, folder, model="m", ids=rule, vocabularies={"user": vocabulary})
    return dmp


def placed(user: int, row: int) -> dict[str, Any]:
    return {"user": ([user], [row])}


def test_training_names_the_rows_of_its_ids(tmp_path: Path, one_rank: None) -> None:
    folder = tmp_path / "store"
    dmp = published(folder)
    with DeltaWriter(folder, model="m", module=dmp, overlap_steps=0) as writer:
        stepper(dmp)(batch(np.random.default_rng(0), USER))
        moved = np.array([1000, 5]), torch.tensor([100, 101])
        writer.push(vocabulary={"user": moved}, removed={"user": [50, 51]})
        assert ids_of(folder) == {1000: 100, 5: 101, 50: REMOVED, 51: REMOVED}
        assert numbers_of(folder)
        writer.push(vocabulary={"user": moved})  # changes nothing
        assert not last_of(folder).ids
        undo_deltas(folder, "m", to=0, why="")
        writer.resume()
        writer.push(vocabulary={"user": ([1000], [50])})
        assert ids_of(folder) == {1000: 50, 5: 101, 50: REMOVED, 51: REMOVED}
        for rows_of, said in (
            ([103], "id 7 has row 103, the table has 103 rows"),
            ([1, 2], r"table 'user': vocabulary: rows are int64 \[2\], expected integers \[1\]"),
            ([1.5], r"vocabulary: rows are float64 \[1\], expected integers \[1\]"),
        ):
            with pytest.raises(InvalidModelError, match=said):
                writer.push(vocabulary={"user": ([7], rows_of)})
        with pytest.raises(InvalidModelError, match="id 60 is given twice"):
            writer.push(vocabulary={"user": ([60], [7])}, removed={"user": [60]})


@pytest.mark.parametrize("wait", [True, False])
def test_ids_of_a_failed_push_come_with_the_next(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    folder = tmp_path / "store"
    with DeltaWriter(folder, model="m", module=published(folder)) as writer:
        with monkeypatch.context() as failing:

            def fail(*_: Any) -> None:
                raise StoreError("the disk is full")

            failing.setattr(line_appender, "append", fail)
            moved: Any = {"user": ([7, 1000], [100, 101])}
            options: Any = {"vocabulary": moved, "removed": {"user": [8]}, "wait": wait}

            def push() -> None:
                writer.push(**options)
                writer.wait()

            with pytest.raises(StoreError, match="the disk is full"):
                push()
        writer.push(vocabulary={"user": ([1000], [102])})
        assert ids_of(folder) == {7: 100, 1000: 102, 8: REMOVED}
        writer.push()
        assert not last_of(folder).ids


def test_ids_come_with_the_next_push_whatever_failed(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    dmp = published(folder)
    with DeltaWriter(folder, model="m", module=dmp) as writer:
        with monkeypatch.context() as failing:

            def fail(*_: Any) -> None:
                raise UnreachableError("timed out")

            failing.setattr(line_appender.LineAppender, "changed_ids", fail)
            with pytest.raises(UnreachableError, match="timed out"):
                writer.push(vocabulary=placed(1000, 100), removed={"user": [8]})
        ids, lengths = torch.tensor([3]), torch.tensor([1, 0])
        stepper(dmp)(KeyedJaggedTensor(["user", "friend"], ids, lengths=lengths))
        (sharded,) = dmp.module.ebc.state_dict().values()
        weight = sharded.local_shards()[0].tensor.detach()
        trained = weight[3].clone()
        weight[3] = torch.nan
        with pytest.raises(InvalidModelError, match="row 3 "):
            writer.push(vocabulary=placed(1001, 101), removed={"user": [9]})
        weight[3] = trained
        bags = Bags(np.array([103]), np.array([[1], [0]], np.int32), None)
        with pytest.raises(InvalidModelError, match=r"numbers\[0\] is 103"):
            writer.push(vocabulary=placed(1002, 102), goldens=bags)
        with pytest.raises(InvalidModelError, match="id 1003 has row 103"):
            writer.push(vocabulary=placed(1003, 103))
        writer.push(vocabulary=placed(1001, 8), removed={"user": [1000]})  # id 1000 had no row yet
        assert ids_of(folder) == {1001: 8, 1002: 102, 8: REMOVED, 9: REMOVED}
        assert numbers_of(folder) == [3]
        undo_deltas(folder, "m", to=0, why="")
        for user, row in ((1001, 100), (1003, 8)):
            with pytest.raises(RevertedError):
                writer.push(vocabulary=placed(user, row))
        writer.resume()
        writer.push()
    assert ids_of(folder) == {1001: 100, 1002: 102, 1003: 8, 8: REMOVED, 9: REMOVED}


def test_an_id_that_is_back_where_it_was_stays_there(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pushes fail. The first moves the id, the second moves it back."""
    folder = tmp_path / "store"
    with DeltaWriter(folder, model="m", module=published(folder)) as writer:
        with monkeypatch.context() as failing:

            def fail(*_: Any) -> None:
                raise StoreError("the disk is full")

            failing.setattr(line_appender, "append", fail)
            for row in (100, 7):
                with pytest.raises(StoreError, match="the disk is full"):
                    writer.push(vocabulary=placed(7, row))
        writer.push()
        assert not last_of(folder).ids


def test_undone_ids_do_not_replace_those_of_a_later_push(tmp_path: Path, one_rank: None) -> None:
    """Otherwise an evicted id and the id that got its row would share it."""
    folder = tmp_path / "store"
    with DeltaWriter(folder, model="m", module=published(folder)) as writer:
        writer.push(vocabulary=placed(1000, 100))
        undo_deltas(folder, "m", to=0, why="")
        with pytest.raises(RevertedError):
            writer.push(vocabulary=placed(1001, 100), removed={"user": [1000]})
        writer.resume()
        writer.push()
    assert ids_of(folder) == {1001: 100}


def test_ids_of_two_undos_have_their_last_rows(tmp_path: Path, one_rank: None) -> None:
    folder = tmp_path / "store"
    with DeltaWriter(folder, model="m", module=published(folder)) as writer:
        writer.push(vocabulary=placed(1000, 100))
        writer.push(vocabulary=placed(1000, 101))
        for to in (1, 0):
            undo_deltas(folder, "m", to=to, why="")
            writer.resume()
        writer.push()
    assert ids_of(folder) == {1000: 101}


def test_ranks_agree_on_the_rows_of_new_ids(store: Path) -> None:
    script = Path(__file__).with_name("pushing_ids.py")
    done = run_warm_python(script, store, "2", timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == [
        "1",
        "InvalidModelError: table 'user': row 6 is pushed by two ranks",
        "InvalidModelError: table 'user': id 1000 is pushed, and removed by another rank",
        "2",
    ]
    line = line_of(store)
    (first, _), (second, _) = line.deltas()
    changes = [line.ids(delta)["user"] for delta in (first, second)]
    assert changes[0].ids.tolist() == [1000, 1001, 2000]
    assert changes[0].rows.tolist() == [3, 4, 5]
    assert changes[1].ids.tolist() == [1001, 2000, 3000]
    assert changes[1].rows.tolist() == [REMOVED, REMOVED, 6]
    numbers = [change.numbers.tolist() for part in line.rows(first) for change in part]
    assert sorted(numbers) == [[3, 4], [5]]
