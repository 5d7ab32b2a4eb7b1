"""Tests of push(wait=False): a thread writes the rows as they were at the push, and no error is
lost."""

import logging
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forkserver import PYTHON, WarmPopen
from server.python import environment
from store.deltas.conftest import deltas_in, failing_writes, gate_writes, line_of, rows, tag_row
from store.deltas.test_goldens import BAGS, pushed_goldens, version_results
from store.deltas.tracked_training import USER, gathered, ranker, stepper

from embedserve_store import (
    Bags,
    DeltaWriter,
    InvalidModelError,
    ModelStore,
    RevertedError,
    StoreError,
    WriterFencedError,
    publish_sharded,
    undo_deltas,
)
from embedserve_store.deltas import push_runner
from embedserve_store.format.row_layout import dequantize_rows

WAIT_S_MAX = 60.0

pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning"),
]


def user_rows(store: Path, seq: int) -> dict[int, list[float]]:
    """Returns the rows of "user" in a delta, by number."""
    line = line_of(store)
    (user,) = (
        change
        for changes in line.rows(line.manifest(seq)[0])
        for change in changes
        if change.table.name == "user"
    )
    values = dequantize_rows(user.values, "float32", user.table.embedding_dim)
    return dict(zip(user.numbers.tolist(), values.tolist(), strict=True))


def changed_user_rows(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]
) -> dict[int, list[float]]:
    changed = (before["user"] != after["user"]).any(1).nonzero().flatten().tolist()
    return {row: after["user"][row].tolist() for row in changed}


def test_training_continues_while_a_push_is_written(tmp_path: Path, one_rank: None) -> None:
    """The delta has the rows as they were at the push, and the next delta has the later changes."""
    dmp = ranker(tables=USER)
    publish_sharded(dmp, tmp_path, model="m")
    with DeltaWriter(tmp_path, model="m", module=dmp, overlap_steps=0) as writer:
        gate, step = gate_writes(writer), stepper(dmp)
        published = gathered(dmp)
        step(user_batch(1, 2, 3))
        future = writer.push(wait=False)
        at_push = gathered(dmp)
        step(user_batch(2, 3, 4))
        assert not future.done()
        assert deltas_in(tmp_path) == []
        gate.set()
        assert future.result(WAIT_S_MAX) == 1
        assert writer.push() == 2
        after = gathered(dmp)
    assert user_rows(tmp_path, 1) == changed_user_rows(published, at_push)
    assert user_rows(tmp_path, 2) == changed_user_rows(at_push, after)
    assert [*user_rows(tmp_path, 1)] == [1, 2, 3]


def user_batch(*ids: int) -> Any:
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(
        keys=["user", "friend"],
        values=torch.tensor(ids),
        lengths=torch.tensor([len(ids), 0]),
    )


def test_next_push_has_the_rows_of_a_failed_push(tmp_path: Path, one_rank: None) -> None:
    """The next push has their current values. The error is raised once, in a call that all ranks
    make."""
    dmp = ranker(tables=USER)
    publish_sharded(dmp, tmp_path, model="m")
    with DeltaWriter(tmp_path, model="m", module=dmp, overlap_steps=0) as writer:
        step, published = stepper(dmp), gathered(dmp)
        step(user_batch(1, 2))
        with failing_writes(writer):
            future = writer.push(wait=False)
            for _ in range(2):  # a future raises on this rank only
                with pytest.raises(StoreError, match="the store is away"):
                    future.result(WAIT_S_MAX)
        step(user_batch(2, 3))
        with pytest.raises(StoreError, match="the store is away"):
            writer.push()
        assert deltas_in(tmp_path) == []
        assert writer.push() == 1
        after = gathered(dmp)
        step(user_batch(9))
        assert writer.push() == 2
    assert user_rows(tmp_path, 1) == changed_user_rows(published, after)
    assert [*user_rows(tmp_path, 1)] == [1, 2, 3]
    assert [*user_rows(tmp_path, 2)] == [9]


def fail_to_start(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_caller_writes_the_push_if_no_thread_starts(
    store: Path,
    writer: DeltaWriter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The other ranks write in threads and wait for this rank."""
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail_to_start)
        assert writer.push_rows(tag_row(1), wait=False).result(0) == 1
        with failing_writes(writer):
            assert isinstance(writer.push_rows(tag_row(2), wait=False).exception(0), StoreError)
    with pytest.raises(StoreError, match="the store is away"):
        writer.wait()
    assert "no thread for a push: can't start new thread" in caplog.text
    assert writer.push_rows(tag_row(2), wait=False).result(WAIT_S_MAX) == 2


def test_push_waits_for_the_previous_push(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opens the gate only once the next push waits."""
    gate = gate_writes(writer)

    def open_and_wait(futures: list[Future[int]]) -> None:
        gate.set()
        assert not Future.exception(futures[0], WAIT_S_MAX)

    monkeypatch.setattr(push_runner, "wait", open_and_wait)
    first = writer.push_rows(tag_row(1), step=1, wait=False)
    assert writer.push_rows(tag_row(2), step=2) == 2
    assert (first.result(), first.cancel()) == (1, False)
    assert [delta.step for delta in deltas_in(store)] == [1, 2]


@pytest.mark.parametrize("of", [np.array, torch.tensor, list])
def test_arguments_of_push_rows_are_copied(
    store: Path, writer: DeltaWriter, of: Callable[[Any], Any]
) -> None:
    gate = gate_writes(writer)
    ids, values = of([3]), torch.ones(1, 16) if of is torch.tensor else np.ones((1, 16), np.float32)
    bags = Bags(BAGS.ids.copy(), BAGS.lengths.copy(), None)
    answers = version_results(store)
    expected = answers.copy()
    writer.push_rows({"user": (ids, values)}, goldens=(bags, answers), wait=False)
    ids[0], values[0] = 4, 2
    for array in (bags.ids, bags.lengths, answers):
        array[:] = 0
    gate.set()
    writer.wait()
    assert user_rows(store, 1) == {3: [1.0] * 16}
    goldens = pushed_goldens(store)
    np.testing.assert_array_equal(goldens.numbers, BAGS.ids)
    np.testing.assert_array_equal(goldens.lengths, BAGS.lengths)
    np.testing.assert_array_equal(goldens.answers, expected)


def test_goldens_are_computed_at_the_moment_of_the_push(tmp_path: Path, one_rank: None) -> None:
    dmp = ranker(tables=USER)
    publish_sharded(dmp, tmp_path, model="m")
    bags = Bags(np.array([1, 2]), np.array([[2], [0]], np.int32), None)
    with DeltaWriter(tmp_path, model="m", module=dmp) as writer:
        gate, step = gate_writes(writer), stepper(dmp)
        step(user_batch(1, 2))
        writer.push(goldens=bags, wait=False)
        user = gathered(dmp)["user"]
        step(user_batch(1, 2))
        gate.set()
    expected = (user[1] + user[2]).numpy()
    np.testing.assert_allclose(pushed_goldens(tmp_path).answers[0, :16], expected, rtol=1e-6)
    assert (gathered(dmp)["user"][1] != user[1]).all()


@pytest.mark.parametrize(
    ("changes", "goldens", "reason"),
    [
        ({"shop": ([1], rows("user", 1))}, None, "table 'shop' is not in the model"),
        ({"user": ([1], rows("user", 1) * np.nan)}, None, "table 'user': row 1 holds a value"),
        ({"user": 7}, None, "changes are of type int"),
        ({}, ({"user": [[1]]}, None), "goldens are a dict, expected Bags"),
    ],
)
def test_invalid_rows_raise_in_the_call_that_joins_the_push(
    store: Path, writer: DeltaWriter, changes: Any, goldens: Any, reason: str
) -> None:
    writer.push_rows(changes, goldens=goldens, wait=False)
    with pytest.raises(StoreError, match=reason):
        writer.push_rows(tag_row(1), wait=False)
    writer.push_rows(tag_row(1), wait=False)
    writer.wait()
    assert [delta.rows for delta in deltas_in(store)] == [{"tag": 1}]


def test_fenced_writer_stays_fenced(store: Path, writer: DeltaWriter) -> None:
    with DeltaWriter(store, model="m") as other:
        other.push_rows(tag_row(1))
    writer.push_rows(tag_row(2), wait=False)
    for _ in range(2):
        with pytest.raises(WriterFencedError, match="stop"):
            writer.push_rows(tag_row(2), wait=False)


def test_undo_during_a_push_raises_in_push_and_is_cleared_by_resume(
    tmp_path: Path, one_rank: None
) -> None:
    dmp = ranker(tables=USER)
    publish_sharded(dmp, tmp_path, model="m")
    with DeltaWriter(tmp_path, model="m", module=dmp, overlap_steps=0) as writer:
        step = stepper(dmp)
        step(user_batch(1))
        writer.push(wait=False)
        writer.wait()
        undo_deltas(tmp_path, "m", to=0, why="CTR fell")
        step(user_batch(2))
        writer.push(wait=False)
        for _ in range(2):
            with pytest.raises(RevertedError, match="CTR fell"):
                writer.push()
        writer.resume()
        assert writer.push() == 3
        assert [*user_rows(tmp_path, 3)] == [1, 2]
        undo_deltas(tmp_path, "m", to=0, why="CTR fell")
        step(user_batch(3))
        writer.push(wait=False)
        writer.resume()  # raises nothing: the error asks for this call
        assert writer.push() == 5
    assert [*user_rows(tmp_path, 5)] == [1, 2, 3]


def test_resume_raises_push_errors_other_than_an_undo(store: Path, writer: DeltaWriter) -> None:
    with failing_writes(writer):
        writer.push_rows(tag_row(1), wait=False)
        with pytest.raises(StoreError, match="the store is away"):
            writer.resume()
    writer.resume()


def test_close_waits_for_the_push_and_raises_its_error(
    store: Path, tmp_path: Path, one_rank: None
) -> None:
    writer = DeltaWriter(store, model="m")
    writer.push_rows(tag_row(1), wait=False)
    writer.close()
    assert len(deltas_in(store)) == 1
    dmp = ranker(tables=USER)
    publish_sharded(dmp, tmp_path / "own", model="m")
    writer = DeltaWriter(tmp_path / "own", model="m", module=dmp)
    with failing_writes(writer):
        writer.push(wait=False)
        with pytest.raises(StoreError, match="the store is away"):
            writer.close()
    assert dmp.get_delta_tracker() is None
    writer.close()


def push_and_fail(store: Path, changes: Any, futures: list[Future[int]]) -> None:
    with DeltaWriter(store, model="m") as writer:
        futures.append(writer.push_rows(changes, wait=False))
        raise ZeroDivisionError


def test_push_in_flight_finishes_or_logs_its_error_after_a_training_error(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other ranks may not join the push. It is written, or its error is logged."""
    futures: list[Future[int]] = []
    with pytest.raises(ZeroDivisionError):
        push_and_fail(store, tag_row(1), futures)
    assert futures[0].result(WAIT_S_MAX) == 1
    bad = {"user": ([1], rows("user", 1) * np.nan)}
    with caplog.at_level(logging.ERROR), pytest.raises(ZeroDivisionError):
        push_and_fail(store, bad, futures)
    for thread in threading.enumerate():
        if thread.name == "delta-push":
            thread.join(WAIT_S_MAX)
    assert isinstance(futures[1].exception(), InvalidModelError)
    assert "the last push failed: InvalidModelError: changes: table 'user': row 1" in caplog.text


@pytest.mark.parametrize(
    ("ending", "moment", "deltas"),
    [
        (".safetensors", "before", 0),
        (".safetensors", "after", 0),
        (".json", "before", 0),
        (".json", "after", 1),
    ],
)
def test_job_killed_during_a_push_leaves_a_complete_delta_or_none(
    store: Path, ending: str, moment: str, deltas: int
) -> None:
    script = Path(__file__).with_name("killed_push.py")
    command = [*PYTHON, script, store, ending, moment]
    with WarmPopen(command, env=environment(), stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "there\n"
        job.kill()
    line = line_of(store)
    assert [sum(one.rows.values()) for one, _ in line.deltas()] == [1] * deltas
    for delta, _ in line.deltas():
        assert [len(change.numbers) for (change,) in line.rows(delta)] == [1]
    with DeltaWriter(store, model="m") as writer:
        assert writer.push_rows(tag_row(2)) == deltas + 1
    assert ModelStore(store).manifest("m").version == 1
