"""Tests of DeltaWriter: a push writes a whole delta or none, and never overwrites another
writer's."""

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from server.python import run_warm_python
from store.deltas.conftest import deltas_in, failing_writes, line_of, rows, tag_row

from embedserve_store import (
    Bags,
    DeltaWriter,
    IdRule,
    InvalidModelError,
    ModelStore,
    StoreError,
    WriterFencedError,
    publish,
)
from embedserve_store.deltas import append as append_module
from embedserve_store.deltas import line_appender
from embedserve_store.errors import UnreachableError
from embedserve_store.format import delta_file
from embedserve_store.format.delta_file import ChangedRows, encoded_bytes
from embedserve_store.format.delta_manifest import DELTA_SEQ_MAX, manifest_name
from embedserve_store.format.row_layout import dequantize_rows
from embedserve_store.publishing.added_file import STALE_S
from embedserve_store.writing import small_files

TIMEOUT_S = 300


def files_in(store: Path) -> set[str]:
    return {path.name for path in (store / "m/deltas/1").iterdir()}


def test_each_push_writes_one_delta(store: Path, writer: DeltaWriter) -> None:
    assert writer.seq == 0
    pushed = {"user": ([7, 3], rows("user", 2)), "item": (np.array([5]), rows("item", 1))}
    assert writer.push_rows(pushed, step=12) == 1
    assert writer.push_rows({}) == 2
    assert writer.seq == 2
    first, second = deltas_in(store)
    assert (first.rows, first.step, second.rows, second.step) == (
        {"user": 2, "item": 1},
        12,
        {},
        None,
    )
    ((user, item),) = line_of(store).rows(first)
    np.testing.assert_array_equal(user.numbers, [3, 7])
    values = dequantize_rows(user.values, "float32", 16)
    np.testing.assert_array_equal(values, rows("user", 2)[::-1])
    near = dequantize_rows(item.values, "int8", 8)
    np.testing.assert_allclose(near, rows("item", 1), atol=0.02)


def test_store_that_is_gone_is_not_created_anew(store: Path, writer: DeltaWriter) -> None:
    """Deltas in the empty folder of a file system that is not mounted would be missing later."""
    store.rename(store.with_name("away"))
    store.mkdir()
    with pytest.raises(UnreachableError, match="cannot be written: No such file or directory"):
        writer.push_rows(tag_row(1))
    assert [*store.iterdir()] == []
    store.rmdir()
    store.with_name("away").rename(store)
    assert writer.push_rows(tag_row(1)) == 1


@pytest.mark.parametrize("step", [1.5, "7", float("nan"), torch.tensor(2.0)])
def test_step_that_is_no_integer_is_rejected(store: Path, writer: DeltaWriter, step: Any) -> None:
    """No server could read the manifest, nor any delta after it."""
    with pytest.raises(InvalidModelError, match=r"step is .*, expected an integer"):
        writer.push_rows(tag_row(1), step=step)
    assert files_in(store) == set()
    for one in (np.int64(3), torch.tensor(3)):
        writer.push_rows(tag_row(1), step=one)  # type: ignore[call-overload]
    assert [(type(delta.step), delta.step) for delta in deltas_in(store)] == [(int, 3)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pushed_rows_may_be_tensors(store: Path, writer: DeltaWriter, dtype: torch.dtype) -> None:
    values = torch.from_numpy(rows("user", 2)).to(dtype).requires_grad_()
    writer.push_rows({"user": (torch.tensor([3, 7]), values)})
    (delta,) = deltas_in(store)
    (((user,)),) = [tuple(changes) for changes in line_of(store).rows(delta)]
    expected = values.detach().float().numpy()
    np.testing.assert_array_equal(dequantize_rows(user.values, "float32", 16), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shop": ([1], rows("user", 1))}, "table 'shop' is not in the model; tables are user,"),
        ({"user": ([1, 2], rows("user", 1))}, "table 'user': 2 ids for 1 rows"),
        ({"user": ([1, 1], rows("user", 2))}, "table 'user': row 1 is pushed twice"),
        ({"user": ([300], rows("user", 1))}, r"rows\[0\] is 300, the table has 300 rows"),
        ({"user": ([-1], rows("user", 1))}, r"rows\[0\] is -1, the table has 300 rows"),
        ({"user": (["a"], rows("user", 1))}, r"ids are <U1 \[1\], expected row numbers"),
        ({"user": ([1.5], rows("user", 1))}, r"ids are float64 \[1\], expected row numbers"),
        ({"user": ([[1]], rows("user", 1))}, r"ids are int64 \[1, 1\], expected row numbers"),
        ({"user": (np.array([1 << 63], np.uint64), rows("user", 1))}, "no row number"),
        ({"user": ([1], rows("item", 1))}, r"rows are float32 \[1, 8\], expected \[n, 16\]"),
        ({"user": ([1], rows("user", 1)[0])}, r"rows are float32 \[16\], expected"),
        ({"user": ([1], np.ones((1, 16)))}, r"rows are float64 \[1, 16\], expected"),
        ({"user": ([1], rows("user", 1) * np.nan)}, "table 'user': row 1 holds a value"),
        ({"item": ([1], np.full((1, 8), 1e9, np.float32))}, "row 1 holds .*too large for int8"),
        ({"user": rows("user", 1)}, r"'user': changes are of type .*, expected \(ids, rows\)"),
        ({"user": ([1],)}, r"'user': changes are of type tuple, expected \(ids, rows\)"),
    ],
)
def test_invalid_rows_are_rejected_and_nothing_is_written(
    store: Path, writer: DeltaWriter, changes: Any, message: str
) -> None:
    with pytest.raises(InvalidModelError, match=message):
        writer.push_rows(tag_row(1) | changes)
    assert files_in(store) == set()
    assert writer.push_rows(tag_row(1)) == 1


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"changes": [1]}, r"changes are of type list, expected a dict of \(ids, rows\) by table"),
        ({"removed": [1]}, "removed are of type list, expected a dict of ids by table"),
        ({"goldens": 3}, r"goldens are of type int, expected \(bags, results\)"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(
    store: Path, writer: DeltaWriter, argument: Any, message: str, wait: bool
) -> None:
    with pytest.raises(InvalidModelError, match=message):  # noqa: PT012  either call raises
        writer.push_rows(**{"changes": tag_row(1), "wait": wait} | argument)
        writer.wait()
    assert files_in(store) == set()


@pytest.mark.parametrize(("ids", "new"), [([10, -5, 1 << 62], 11), (["a", "b", "ü"], "c")])
def test_vocabulary_ids_are_translated_to_row_numbers(
    tmp_path: Path, make_ebc: Callable[..., Any], ids: list[Any], new: Any
) -> None:
    store = tmp_path / "own"
    rule = IdRule("map", id_type="int64" if isinstance(new, int) else "string")
    publish(make_ebc(), store, model="m", ids={"user": rule}, vocabularies={"user": ids})
    with DeltaWriter(store, model="m") as writer:
        writer.push_rows({"user": ([ids[2], ids[0]], rows("user", 2))})
        kinds = "expected row numbers" if isinstance(new, int) else "id 3 is not a string"
        with pytest.raises(InvalidModelError, match=kinds):
            writer.push_rows({"user": (["a"] if isinstance(new, int) else [3], rows("user", 1))})
        writer.push_rows({"user": ([new], rows("user", 1))})
    delta, later = deltas_in(store)
    ((user,),) = line_of(store).rows(later)
    np.testing.assert_array_equal(user.numbers, [3])
    ((user,),) = line_of(store).rows(delta)
    np.testing.assert_array_equal(user.numbers, [0, 2])
    values = dequantize_rows(user.values, "float32", 16)
    np.testing.assert_array_equal(values, rows("user", 2)[::-1])


@pytest.mark.parametrize("fails", [False, True])
def test_closed_writer_pushes_nothing(store: Path, fails: bool) -> None:
    """Covers a writer whose with block was left by an error, too."""
    with suppress(KeyError), DeltaWriter(store, model="m") as writer:
        writer.push_rows({})
        if fails:
            raise KeyError
    with pytest.raises(ValueError, match="is closed"):
        writer.push_rows(tag_row(1))
    assert len(deltas_in(store)) == 1


def test_next_writer_continues_after_the_last_delta(store: Path) -> None:
    for seq in (1, 2, 3):
        with DeltaWriter(store, model="m") as writer:
            assert writer.seq == seq - 1
            assert writer.push_rows(tag_row(seq)) == seq
    assert len({delta.token for delta in deltas_in(store)}) == 3


def test_writer_is_fenced_once_another_writer_pushes(store: Path, writer: DeltaWriter) -> None:
    with DeltaWriter(store, model="m") as other:
        assert other.push_rows(tag_row(1)) == 1
        for _ in range(2):
            with pytest.raises(WriterFencedError, match="stop"):
                writer.push_rows(tag_row(2))
        assert other.push_rows({}) == 2
    assert [delta.rows for delta in deltas_in(store)] == [{"tag": 1}, {}]


def test_exactly_one_of_concurrent_writers_gets_a_seq(store: Path) -> None:
    writers = [DeltaWriter(store, model="m") for _ in range(4)]
    start = threading.Barrier(len(writers))
    outcomes: list[int | str] = []

    def push(writer: DeltaWriter, row: int) -> None:
        start.wait()
        try:
            outcomes.append(writer.push_rows(tag_row(row)))
        except WriterFencedError:
            outcomes.append("fenced")

    threads = [threading.Thread(target=push, args=(one, row)) for row, one in enumerate(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, outcomes)) == ["1", "fenced", "fenced", "fenced"]
    assert len(deltas_in(store)) == 1


def test_lost_response_does_not_fence_the_writer(store: Path, writer: DeltaWriter) -> None:
    """The store writes the delta, but the writer gets an error. It continues after its own
    delta."""
    with (
        failing_writes(writer, ".json", is_written=True),
        pytest.raises(StoreError, match="the store is away"),
    ):
        writer.push_rows(tag_row(1))
    assert writer.push_rows(tag_row(2)) == 2
    assert [delta.rows for delta in deltas_in(store)] == [{"tag": 1}, {"tag": 1}]


@pytest.mark.parametrize("is_written", [True, False])
def test_writer_is_fenced_by_a_delta_after_its_lost_push(
    store: Path, writer: DeltaWriter, is_written: bool
) -> None:
    """Covers a writer that continues after its own deltas: that of another one is none of them."""
    with (
        failing_writes(writer, ".json", is_written=is_written),
        pytest.raises(StoreError, match="the store is away"),
    ):
        writer.push_rows(tag_row(1))
    with DeltaWriter(store, model="m") as other:
        assert other.push_rows(tag_row(2)) == 1 + is_written
    with pytest.raises(WriterFencedError, match="stop"):
        writer.push_rows(tag_row(3))
    assert len(deltas_in(store)) == 1 + is_written


@pytest.mark.parametrize("changes", [tag_row(1), {}])
def test_push_retried_after_a_lost_response_is_written_once(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch, changes: Any
) -> None:
    """The first response was lost, so the writer sends the file again, and the store responds that
    it exists."""
    real = writer._line.write

    def write_twice(name: str, data: bytes) -> bool:
        real(name, data)
        return real(name, data)

    monkeypatch.setattr(writer._line, "write", write_twice)
    assert writer.push_rows(changes) == 1
    assert writer.push_rows(changes) == 2
    assert line_of(store).seqs() == [1, 2]


def test_seq_beyond_the_largest_is_rejected(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers keep a seq in 32 bits."""
    writer.push_rows({})
    line = line_of(store)
    position = replace(line.manifest(1)[1], seq=DELTA_SEQ_MAX)
    assert line.after(position) is None
    writer._line.position = position
    with pytest.raises(InvalidModelError, match=r"seq is 4294967296, the limit is 4294967295"):
        writer.push_rows({})
    for seq in (0, DELTA_SEQ_MAX + 1):
        with pytest.raises(StoreError, match=f"seq is {seq}, expected 1 to 4294967295"):
            line.manifest(seq)


def test_manifest_over_the_size_limit_is_not_written(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append_module, "MANIFEST_BYTES_MAX", 100)
    with pytest.raises(
        InvalidModelError,
        match="bytes, with 0 files and 0 examples of goldens, the limit is 100: push",
    ):
        writer.push_rows({})
    assert deltas_in(store) == []


def test_failed_push_leaves_no_delta(store: Path, writer: DeltaWriter) -> None:
    """Fails the write of each kind of file. No reader sees the push, and the same push succeeds
    later."""
    for ending in (".safetensors", ".json"):
        with (
            failing_writes(writer, ending),
            pytest.raises(StoreError, match="the store is away"),
        ):
            writer.push_rows(tag_row(1))
        assert deltas_in(store) == []
    assert writer.push_rows(tag_row(1)) == 1
    assert len(deltas_in(store)) == 1


def test_store_without_hard_links_is_rejected_unless_is_alone(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*paths: Any) -> None:
        raise OSError(next(iter(small_files.NO_LINKS)), "no hard links")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(StoreError, match=r"two writers could overwrite .* is_alone=True"):
        DeltaWriter(store, model="m")
    with DeltaWriter(store, model="m", is_alone=True) as writer:
        assert writer.push_rows(tag_row(1)) == 1
    assert len(deltas_in(store)) == 1


def test_read_only_store_is_unreachable(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("write_bytes", "unlink"):
        monkeypatch.setattr(Path, name, read_only)
    with pytest.raises(UnreachableError, match="cannot be written: Read-only file system"):
        DeltaWriter(store, model="m")


def test_unknown_model_or_version_is_rejected(store: Path) -> None:
    with pytest.raises(StoreError, match="version 2 does not exist"):
        DeltaWriter(store, model="m", version=2)
    with pytest.raises(StoreError, match="no model 'other'"):
        DeltaWriter(store, model="other")


def test_next_writer_removes_stale_files_of_a_killed_writer(store: Path) -> None:
    folder = store / "m/deltas/1"
    folder.mkdir(parents=True)
    stale_file = folder / f"{small_files.ASIDE_PREFIX}0123"
    stale_file.write_bytes(b"half")
    old_s = stale_file.stat().st_mtime - STALE_S - 60
    os.utime(stale_file, (old_s, old_s))
    with DeltaWriter(store, model="m") as writer:
        writer.push_rows(tag_row(1))
    assert not stale_file.exists()
    assert len(files_in(store)) == 2


def test_push_over_the_delta_limits_is_split_into_several_deltas(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_file, "FILE_VALUES_BYTES", 64)  # one row of a user
    (table,) = (one for one in ModelStore(store).manifest("m").tables if one.name == "user")
    one_row = ChangedRows(table, np.zeros(1, np.int64), np.zeros((1, 64), np.uint8))
    size = encoded_bytes([one_row])
    monkeypatch.setattr(line_appender, "DELTA_BYTES_MAX", 3 * size)
    values = rows("user", 7)
    answers = np.zeros((1, 48), np.float32)
    bags = Bags(np.zeros(0, np.int64), np.zeros((4, 1), np.int32), None)
    assert writer.push_rows({"user": (range(7), values)}, step=5, goldens=(bags, answers)) == 3
    deltas = deltas_in(store)
    assert [delta.rows["user"] for delta in deltas] == [3, 3, 1]
    assert [delta.goldens is not None for delta in deltas] == [False, False, True]
    assert {delta.step for delta in deltas} == {5}
    pushed = [change for delta in deltas for (change,) in line_of(store).rows(delta)]
    assert [number for change in pushed for number in change.numbers] == [*range(7)]
    stored = np.concatenate([change.values for change in pushed])
    np.testing.assert_array_equal(dequantize_rows(stored, "float32", 16), values)
    named = {file.name for delta in deltas for file in delta.files}
    assert files_in(store) == named | {manifest_name(seq) for seq in (1, 2, 3)}
    monkeypatch.setattr(line_appender, "FILES_MAX", 2)
    assert writer.push_rows({"user": (range(4), values[:4])}) == 5


def test_files_of_all_ranks_are_split_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_appender, "DELTA_BYTES_MAX", 10)
    monkeypatch.setattr(line_appender, "FILES_MAX", 4)
    file_counts = line_appender._file_counts
    assert file_counts([[]], []) == [[0]]
    assert file_counts([[], []], [5, 5]) == [[0, 0]]
    assert file_counts([[5, 5], [], [5]], []) == [[1, 0, 1], [1, 0, 0]]
    assert file_counts([[5, 5], [], [5]], [5]) == [[1, 0, 1], [1, 0, 0]]
    assert file_counts([[5, 5], [], [5]], [6]) == [[1, 0, 1], [1, 0, 0], [0, 0, 0]]
    assert file_counts([[1, 1, 1], [1, 1, 1]], []) == [[2, 2], [1, 1]]
    assert file_counts([[1, 1], [1]], [1, 1]) == [[2, 1], [0, 0]]
    with pytest.raises(InvalidModelError, match="ids of a push are 11 bytes, the limit is 10"):
        file_counts([[1]], [5, 6])


def test_ranks_push_one_delta_together(store: Path) -> None:
    """Every rank returns the same seq or raises the same error, and the delta has the rows of all
    ranks."""
    script = Path(__file__).with_name("pushing_ranks.py")
    done = run_warm_python(script, store, "rows", timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    outside = "changes: table 'user': rows[0] is 300, the table has 300 rows"
    assert done.stdout.splitlines() == [
        "1",
        "2",
        f"InvalidModelError: {outside}",
        "InvalidModelError: table 'user': row 50 is pushed by two ranks",
        "3",
        "5",
    ]
    counts = [delta.rows.get("user", 0) for delta in deltas_in(store)]
    assert counts == [4, 1, 0, 2, 2]
    first = deltas_in(store)[0]
    changed = [user for (user,) in line_of(store).rows(first)]
    assert [[*one.numbers] for one in changed] == [[0, 10], [1, 11]]
