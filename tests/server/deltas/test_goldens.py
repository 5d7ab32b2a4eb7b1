"""Tests of the goldens of deltas: compared before a delta becomes visible, and again while it is
served."""

import logging
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from server.deltas.followed import ROWS, Followed
from server.deltas.tables import (
    by_key,
    changed,
    random_changes,
    read,
    state_of,
    states_equal,
    version_of,
)

from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.rows_writer import RowsWriter
from embedserve.deltas.shared_goldens import CheckedGoldens, LiveGoldens, SharedGoldens
from embedserve.deltas.version_memory import VersionMemory
from embedserve_store import Bags, undo_deltas
from embedserve_store.errors import GoldensError
from embedserve_store.format.delta_goldens import (
    EXAMPLES_MAX,
    GOLDENS_BYTES_MAX,
    IDS_MAX,
    DeltaGoldens,
)
from embedserve_store.goldens.reference_pooling import RowsOf


def push(followed: Followed, row: int, value: float, expected: float | None = None) -> int:
    """Pushes a row of equal values, with a golden of that row alone and the ``expected`` value."""
    bags = Bags(np.array([row]), np.array([[1, 0]], np.int32), None)
    answers = np.zeros((2, 4), np.float32)
    answers[0] = value if expected is None else expected
    changes = {"t": ([row], np.full((1, 4), value, np.float32))}
    return followed.writer.push_rows(changes, goldens=(bags, answers))


def test_delta_with_matching_goldens_is_applied(followed: Followed) -> None:
    push(followed, 1, 1.5)
    assert (*followed.poll(), followed.changed()) == ("following", 1, {1: 1.5})


def test_goldens_are_compared_with_earlier_and_published_rows(followed: Followed) -> None:
    followed.push(3, value=2)
    followed.follower.poll_once()
    bags = Bags(np.array([3, 5, 3]), np.array([[1, 2]], np.int32), None)
    version = followed.models.load("m")
    five = version.tables.rows("t")[5].view(np.float32)
    answers = np.stack([np.full(4, 2, np.float32), five + 2])
    followed.writer.push_rows({}, goldens=(bags, answers))
    assert followed.poll() == ("following", 2)
    followed.writer.push_rows({"t": ([5], five[None] + 1)}, goldens=(bags, answers))
    assert followed.poll() == ("stalled", 2)
    assert "goldens: 'f' (table 't'), example 1, column 0: " in followed.status.read().reason


def test_golden_mismatch_stalls_the_line_before_that_delta(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    push(followed, 1, 1)
    push(followed, 2, 1, expected=1.25)
    with caplog.at_level(logging.ERROR):
        assert (*followed.poll(), followed.changed()) == ("stalled", 1, {1: 1})
        assert followed.status.read().reason == (
            "delta 2: goldens: 'f' (table 't'), example 0, column 0: the rows give 1, training had "
            "1.25, and their dtypes explain 1.2e-05; 4 of 8 values differ"
        )
        push(followed, 3, 1)  # its own goldens are right
        followed.follower.poll_once()
    assert (followed.state, followed.live.seq, followed.changed()) == ("stalled", 1, {1: 1})
    assert len(caplog.records) == 1
    assert followed.status.read().rows_changed == 1


def test_only_goldens_of_the_last_delta_in_a_step_are_compared(followed: Followed) -> None:
    push(followed, 1, 1)
    push(followed, 1, 2)  # the first delta's goldens are of rows that this one changes
    followed.follower.poll_once()
    assert (followed.state, followed.rows.steps, followed.changed()) == ("following", [2], {1: 2})


def test_goldens_count_toward_the_step_size(followed: Followed) -> None:
    for value in (1, 2, 3):
        push(followed, 1, value)
    delta, _ = followed.line.manifest(1)
    assert delta.goldens is not None
    followed.follower._step_bytes = 2 * delta.nbytes + delta.goldens.nbytes
    while followed.follower.poll_once():
        pass
    assert followed.rows.steps == [1, 2, 3]


def test_undo_resumes_a_line_stalled_by_goldens(followed: Followed) -> None:
    push(followed, 1, 1)
    push(followed, 2, 1, expected=9)
    assert followed.poll()[0] == "stalled"
    undo_deltas(followed.models.where, "m", to=1, why="wrong rows")
    assert followed.follower.poll_once()
    assert (*followed.poll(), followed.changed()) == ("following", 3, {1: 1})
    followed.writer.resume()
    push(followed, 3, 4)
    followed.follower.poll_once()
    assert (followed.state, followed.changed()) == ("following", {1: 1, 3: 4})


def test_rejected_deltas_use_no_memory_and_keep_undos_available(followed: Followed) -> None:
    for row in range(4):
        push(followed, row, 1)
        followed.follower.poll_once()
    push(followed, 4, 1, expected=2)
    followed.follower.poll_once()
    before = followed.status.read()
    for _ in range(20):
        followed.follower.poll_once()
    now = followed.status.read()
    assert (now.memory_bytes, now.undo_from) == (before.memory_bytes, before.undo_from)
    assert before.undo_from == 0


def test_rejected_rows_do_not_affect_later_deltas_or_lookups(tmp_path: Path) -> None:
    """Checks that the memory of rejected rows is used again, also during a lookup."""
    version = version_of(tmp_path)
    live = LiveRows(version, 64 << 10, readers=1)
    writer, reader = RowsWriter(live), RowsReader(live, 0, version.plan)
    random, state = np.random.default_rng(0), state_of(version)
    for seq in range(1, 30):
        view, _ = reader.begin()
        changes = random_changes(random, 8)
        with pytest.raises(GoldensError):
            writer.apply(seq, changes, Mock(side_effect=GoldensError("refused")))
        assert live.seq == seq - 1
        following = random_changes(random, 8)
        expected = changed(state, following)

        def compare(rows_of: RowsOf, expected: dict[str, np.ndarray] = expected) -> None:
            for spec in version.manifest.tables:
                sampled = random.integers(0, spec.num_embeddings, 50)
                stored = expected[spec.name][sampled].view(np.float32)[:, : spec.embedding_dim]
                np.testing.assert_array_equal(rows_of(spec, sampled), stored)

        writer.apply(seq, following, compare)
        assert states_equal(read(live, reader, view), by_key(live, state))  # the rows before
        reader.end(view)
        state = expected


def checked_goldens(seq: int, examples: int = 2, ids: int = 3, columns: int = 4) -> CheckedGoldens:
    random = np.random.default_rng(seq)
    goldens = DeltaGoldens(
        random.integers(0, 9, ids),
        np.full((1, examples), 1, np.int32),
        random.normal(size=ids).astype(np.float32) if seq % 2 else None,
        random.normal(size=(examples, columns)).astype(np.float32),
        "float32",
    )
    return CheckedGoldens(seq, goldens, np.abs(goldens.answers))


def test_shared_goldens_round_trip() -> None:
    shared = SharedGoldens(VersionMemory.create())
    assert shared.read() is None
    largest = (GOLDENS_BYTES_MAX - 12 * IDS_MAX - 4 * EXAMPLES_MAX) // 4 // EXAMPLES_MAX
    for one in (
        checked_goldens(1),
        checked_goldens(2),
        checked_goldens(3, EXAMPLES_MAX, IDS_MAX, largest),
        checked_goldens(4),
    ):
        shared.write(one)
        found = shared.read()
        assert found is not None
        assert (found.seq, found.goldens.arrays.keys()) == (one.seq, one.goldens.arrays.keys())
        for name, array in found.goldens.arrays.items():
            np.testing.assert_array_equal(array, one.goldens.arrays[name])
        np.testing.assert_array_equal(found.bounds, one.bounds)
    shared.clear()
    assert shared.read() is None


def test_partially_written_goldens_are_not_read() -> None:
    shared = SharedGoldens(VersionMemory.create())
    shared.write(checked_goldens(1))
    other = SharedGoldens(VersionMemory.create())
    other.write(checked_goldens(3, examples=3))
    part = shared._record._part
    for size in range(4, 100, 3):
        whole = bytes(part[:800])
        part[:size] = other._record._part[:size]
        found = shared.read()
        assert found is None or found.seq == 1
        part[:800] = whole
    part[4:8] = b"\xff" * 4  # its size
    assert shared.read() is None


def test_delta_without_goldens_clears_the_shared_goldens(followed: Followed) -> None:
    """Covers goldens under the same seq, from a delta that was replaced before it was committed."""
    followed.goldens.write(checked_goldens(1))
    followed.push(1)
    followed.follower.poll_once()
    assert (followed.live.seq, followed.goldens.read()) == (1, None)


def test_only_goldens_of_the_view_of_new_lookups_are_looked_up(followed: Followed) -> None:
    live = LiveGoldens(followed.goldens, followed._reader, followed.models.manifest("m"))
    looked_up: list[list[int]] = []

    def lookup(value: float) -> Callable[..., np.ndarray]:
        def look_up(numbers: np.ndarray, lengths: np.ndarray, weights: object) -> np.ndarray:
            looked_up.append(numbers.tolist())
            return np.array([[value] * 4, [0] * 4], np.float32)

        return look_up

    live.check(lookup(0))  # there are none
    push(followed, 1, 1.5)
    followed.follower.poll_once()
    live.check(lookup(1.5))
    assert len(looked_up) == 1
    assert looked_up[0][0] >= ROWS  # a changed row
    with pytest.raises(GoldensError, match=r"delta 1 of 'm': goldens: 'f' .* the rows give 1\.6"):
        live.check(lookup(1.6))
    assert followed.live.lowest_view_read() > 1 << 60  # the view has ended
    push(followed, 1, 1, expected=2)
    followed.follower.poll_once()  # rejected: the goldens of the delta before stay
    live.check(lookup(1.5))
    assert len(looked_up) == 3
    undo_deltas(followed.models.where, "m", to=0, why="test")
    followed.follower.poll_once()
    followed.follower.poll_once()
    live.check(lookup(0))  # the rows are those of another delta
    followed.writer.resume()
    push(followed, 2, 1)
    followed.follower.poll_once()
    followed.push(1)
    followed.follower.poll_once()
    live.check(lookup(0))  # the last delta has none
    assert len(looked_up) == 3
