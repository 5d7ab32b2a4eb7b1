"""Tests of DeltaWriter with ids that callers add and remove with the rows that they push."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from server.python import run_warm_python
from store.deltas.conftest import DIMS, failing_writes, ids_of, last_of, line_of, numbers_of, rows

from embedserve_store import (
    Bags,
    DeltaWriter,
    IdRule,
    InvalidModelError,
    StoreError,
    TableSpec,
    compact_deltas,
    publish,
    undo_deltas,
)
from embedserve_store.commands.deltas import list_deltas, verify_deltas
from embedserve_store.deltas import delta_line, line_appender
from embedserve_store.deltas.append import append, as_of_now
from embedserve_store.errors import UnreachableError
from embedserve_store.format import changed_ids, delta_file
from embedserve_store.format.changed_ids import REMOVED, ChangedIds
from embedserve_store.format.delta_file import repeated_row

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


def test_string_ids_are_accepted_and_removals_need_a_vocabulary(store: Path) -> None:
    with DeltaWriter(store, model="m") as writer:
        writer.push_rows(
            {"item": (["c", "a"], rows("item", 2)), "tag": ([3], rows("tag", 1))},
            removed={"item": ["b"]},
        )
        assert sorted(ids_of(store, "item").values()) == [REMOVED, 2]
        for name, message in (
            ("tag", "has no vocabulary"),
            ("more", "is not in the model; tables"),
        ):
            with pytest.raises(InvalidModelError, match=f"table '{name}' {message}"):
                writer.push_rows({}, removed={name: [3]})
        with pytest.raises(InvalidModelError, match="id 3 is not a string"):
            writer.push_rows({}, removed={"item": [3]})
        with pytest.raises(InvalidModelError, match=r"table 'item': ids: .* is no text"):
            writer.push_rows({"item": (["\ud800"], rows("item", 1))})


@pytest.mark.parametrize(
    ("pushed", "removed", "message"),
    [
        ([7, 100], [100], r"table 'user': ids\[1\] is 100, which is removed in the same delta"),
        ([], [7], "table 'user': id 7 is removed, but is not in the vocabulary"),
        ([], [100, 100], "table 'user': id 100 is given twice"),
        ([7, 7], [], "table 'user': row 3 is pushed twice"),
        ([*range(1000, 1298)], [], "298 new ids, but only 297 rows without an id: remove ids"),
    ],
)
def test_invalid_id_changes_are_rejected_and_nothing_is_pushed(
    store: Path, pushed: list[int], removed: list[int], message: str
) -> None:
    with DeltaWriter(store, model="m") as writer:
        with pytest.raises(InvalidModelError, match=message):
            writer.push_rows(
                {"user": (pushed, rows("user", len(pushed)))}, removed={"user": removed}
            )
        assert not line_of(store).seqs()
        writer.push_rows({"user": ([7], rows("user", 1))})
    assert ids_of(store) == {7: 3}


def test_failed_push_assigns_no_row(store: Path) -> None:
    with DeltaWriter(store, model="m") as writer:
        with failing_writes(writer, ".json"), pytest.raises(StoreError, match="is away"):
            writer.push_rows({"user": ([7], rows("user", 1))}, removed={"user": [100]})
        writer.push_rows({"user": ([8, 100], rows("user", 2))})
        assert ids_of(store) == {8: 3}


def test_changed_ids_of_a_split_push_are_in_its_last_delta(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_file, "FILE_VALUES_BYTES", 64)  # one row of a user
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
        with pytest.raises(
            InvalidModelError, match="changed ids of a push are 4112 bytes, the limit"
        ):
            writer.push_rows({"user": ([9], rows("user", 1))})
        assert {*(store / "m/deltas/1").iterdir()} == files


def test_ids_in_several_files_are_checked_for_repeats_once(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_ids, "_FILE_IDS", 1)
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


@pytest.mark.parametrize("again", [False, True])
def test_next_push_knows_the_ids_of_a_push_with_a_lost_response(store: Path, again: bool) -> None:
    with DeltaWriter(store, model="m") as writer:
        lost: Any = {"user": ([7], rows("user", 1))}
        with (
            failing_writes(writer, ".json", is_written=True),
            pytest.raises(StoreError, match="the store is away"),
        ):
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


def test_late_push_does_not_assign_a_row_twice(
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


def test_next_writer_knows_the_ids_of_the_line(store: Path) -> None:
    with DeltaWriter(store, model="m") as writer:
        writer.push_rows({"user": ([7], rows("user", 1))}, removed={"user": [100]})
    for _ in range(2):  # from version 1, then from the compacted one
        with DeltaWriter(store, model="m") as writer:
            writer.push_rows({"user": ([7, 9], rows("user", 2))})
            assert ids_of(store) == {9: 0}  # the row of id 100
            writer.push_rows({}, removed={"user": [9]})
        compact_deltas(store, "m")


def test_undo_restores_the_earlier_ids(store: Path) -> None:
    with DeltaWriter(store, model="m") as writer:
        writer.push_rows({"user": ([7], rows("user", 1))})
        writer.push_rows({"user": ([8], rows("user", 1))}, removed={"user": [7]})
        undo_deltas(store, "m", to=1, why="")
        writer.resume()
        writer.push_rows({"user": ([9, 7], rows("user", 2))})
        assert ids_of(store) == {9: 4}
        assert numbers_of(store) == [3, 4]


def test_goldens_may_use_ids_added_by_the_same_push(store: Path) -> None:
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


def test_ranks_agree_on_the_rows_of_new_ids(store: Path) -> None:
    script = Path(__file__).with_name("pushing_ranks.py")
    done = run_warm_python(script, store, "ids", timeout_s=TIMEOUT_S)
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


def test_tables_whose_shared_ids_change_differently_are_rejected(tmp_path: Path) -> None:
    tables = [
        TableSpec(name, 8, 4, ("x",), "sum", "float32", ids=IdRule("map")) for name in ("a", "b")
    ]
    weights = {f"ebc.embedding_bags.{one.name}.weight": torch.zeros(8, 4) for one in tables}
    vocabularies = {one.name: [1, 2] for one in tables}
    publish(weights, tmp_path, model="m", tables=tables, vocabularies=vocabularies)
    changes = {
        one.name: ChangedIds(one, np.array([5]), np.array([row])) for row, one in enumerate(tables)
    }
    with DeltaWriter(tmp_path, model="m") as writer:
        writer._line.append({}, changes, None, None, as_of_now())
    with pytest.raises(StoreError, match="tables 'a' and 'b' share features, but their ids change"):
        ids_of(tmp_path, "a")
