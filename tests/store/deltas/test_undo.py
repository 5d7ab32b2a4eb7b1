"""Tests of undo: a line returns to an earlier delta, and its training job gets an error."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store.deltas.conftest import failing_writes, line_of, push

from embedserve_store import (
    DeltaLine,
    DeltaWriter,
    ModelStore,
    RevertedError,
    StoreError,
    WriterFencedError,
    compact_deltas,
    publish,
    set_alias,
    undo_deltas,
)
from embedserve_store.deltas import undo as undo_module
from embedserve_store.deltas.append import append
from embedserve_store.errors import UnreachableError
from embedserve_store.format.delta_manifest import DeltaManifest, manifest_name
from embedserve_store.publishing.added_file import Write
from embedserve_store.writing import small_files


def undo(store: Path, to: int, why: str = "CTR fell") -> int:
    return undo_deltas(store, "m", to=to, why=why, version=1).seq


def kept_seqs(store: Path, last: int) -> list[int]:
    return [delta.seq for delta in line_of(store).deltas_in_state(last)]


def test_undo_appends_a_delta_without_rows(store: Path, writer: DeltaWriter) -> None:
    for row in (1, 2, 3):
        push(writer, row)
    made = undo_deltas(store, "m", to=1, why="CTR fell")
    *_, (delta, position) = line_of(store).deltas()
    assert delta == made
    assert (delta.seq, delta.reverts_to, delta.why, delta.rows) == (4, 1, "CTR fell", {})
    assert position.seq == 4
    (event,) = (one for one in ModelStore(store).history("m") if one.what == "undo")
    assert event.detail == "line 1, delta 4 reverts to 1: CTR fell"


def test_undone_deltas_are_excluded_from_kept_and_between(store: Path, writer: DeltaWriter) -> None:
    for row in (1, 2, 3):
        push(writer, row)
    undo(store, 1)  # delta 4
    writer.resume()
    push(writer, 5)
    undo(store, 2)  # delta 6: undoes an undo
    undo(store, 0)  # delta 7
    undo(store, 5)  # delta 8
    states = {1: [1], 3: [3, 2, 1], 4: [1], 5: [5, 1], 6: [2, 1], 7: [], 8: [5, 1]}
    assert {last: kept_seqs(store, last) for last in states} == states
    line = line_of(store)
    for one in range(9):
        for other in range(9):
            expected = set(kept_seqs(store, one)) ^ set(kept_seqs(store, other))
            assert [delta.seq for delta in line.between(one, other)] == sorted(expected)[::-1]


def test_version_compacted_after_an_undo_has_the_reverted_rows(
    store: Path, writer: DeltaWriter
) -> None:
    published = ModelStore(store).load("m", 1).tables.rows("tag").copy()
    push(writer, 1, 2)
    after = ModelStore(store).load("m", compact_deltas(store, "m").version).tables.rows("tag")
    push(writer, 2, 3)
    undo(store, 1)
    undone = compact_deltas(store, "m", version=1).version
    np.testing.assert_array_equal(ModelStore(store).load("m", undone).tables.rows("tag"), after)
    undo(store, 0)
    undone = compact_deltas(store, "m", version=1).version
    np.testing.assert_array_equal(ModelStore(store).load("m", undone).tables.rows("tag"), published)


def test_impossible_undo_is_rejected(store: Path, writer: DeltaWriter) -> None:
    with pytest.raises(StoreError, match="line 1 has no delta after version 1: nothing to undo"):
        undo(store, 0)
    push(writer, 1)
    push(writer, 2)
    for to in (2, 3, -1):
        with pytest.raises(StoreError, match=f"delta {to}: expected 0 to 1; line 1 ends with 2"):
            undo(store, to)
    with pytest.raises(StoreError, match="why has 1001 characters"):
        undo(store, 0, "x" * 1001)
    compact_deltas(store, "m", seq=1)
    with pytest.raises(
        StoreError,
        match=r"delta 0: expected 1 to 1; line 1 ends with 2. Version 2 has the deltas up to 1 in "
        "its rows, so 1 is the earliest that it can go back to",
    ):
        undo_deltas(store, "m", to=0, why="")
    assert line_of(store).seqs() == [1, 2]
    assert undo_deltas(store, "m", to=1, why="").seq == 3


def test_undo_without_version_is_rejected_if_an_alias_names_another_line(
    store: Path, writer: DeltaWriter, make_ebc: Callable[..., Any]
) -> None:
    """Servers of the alias would keep the bad rows."""
    push(writer, 1)
    push(writer, 2)
    compacted = compact_deltas(store, "m", seq=1).version
    set_alias(store, "m", "stable", 1)
    assert undo_deltas(store, "m", to=1, why="").seq == 3  # both versions are of line 1
    publish(make_ebc(), store, model="m")
    set_alias(store, "m", "canary", compacted)
    with pytest.raises(
        StoreError,
        match="m: the newest version is of line 3, but canary names version 2 of line 1, stable "
        r"names version 1 of line 1\. Name the version or alias whose line is meant",
    ):
        undo_deltas(store, "m", to=1, why="")
    assert line_of(store).seqs() == [1, 2, 3]
    assert undo_deltas(store, "m", to=2, why="", version="stable").line == 1
    for alias in ("canary", "stable"):
        set_alias(store, "m", alias, 3)
    with pytest.raises(StoreError, match="line 3 has no delta after version 3: nothing to undo"):
        undo_deltas(store, "m", to=0, why="")


def test_compaction_up_to_an_undone_delta_is_rejected(store: Path, writer: DeltaWriter) -> None:
    """A version with its rows could not follow the line."""
    for row in (1, 2, 3):
        push(writer, row)
    undo(store, 1)
    with pytest.raises(StoreError, match=r"delta 3 of line 1 was undone: delta 4 reverts to 1; "):
        compact_deltas(store, "m", seq=3)
    assert compact_deltas(store, "m", seq=1).version == 2
    writer.resume()
    push(writer, 5)
    path = store / "m/deltas/1" / f"{5:020d}.json"
    path.chmod(0o644)
    path.write_bytes(b"{}")
    assert compact_deltas(store, "m", version=1, seq=4).version == 3  # the damaged one is later


def test_compaction_fails_if_a_later_delta_is_unreachable(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version up to an earlier delta is then not published."""
    for row in (1, 2):
        push(writer, row)
    undo(store, 0)
    real = ModelStore.read

    def fail_to_read(models: ModelStore, path: str, *limit: int) -> bytes:
        if path.endswith(manifest_name(3)):
            raise UnreachableError("timed out")
        return real(models, path, *limit)

    monkeypatch.setattr(ModelStore, "read", fail_to_read)
    with pytest.raises(UnreachableError, match="timed out"):
        compact_deltas(store, "m", seq=2)
    assert ModelStore(store).versions("m") == [1]


def test_undo_follows_a_delta_pushed_concurrently(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(writer, 1)
    push(writer, 2)

    def append_later(write: Write, delta: DeltaManifest) -> object:
        monkeypatch.setattr(undo_module, "append", append)
        push(writer, 3)
        return append(write, delta)

    monkeypatch.setattr(undo_module, "append", append_later)
    assert undo(store, 1) == 4
    assert kept_seqs(store, 4) == [1]


@pytest.fixture
def overwriting_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the store let a second file replace the first."""

    def link(aside: Path, path: Path) -> None:
        aside.replace(path)

    monkeypatch.setattr(small_files, "_link", link)


def call_after_listing(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Calls ``act`` once, after a line has been listed."""
    real = DeltaLine.seqs

    def seqs(line: DeltaLine) -> list[int]:
        found = real(line)
        monkeypatch.setattr(DeltaLine, "seqs", real)
        act()
        return found

    monkeypatch.setattr(DeltaLine, "seqs", seqs)


def test_undo_overwrites_no_delta_pushed_after_the_listing(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch, overwriting_store: None
) -> None:
    push(writer, 1)
    push(writer, 2)
    call_after_listing(monkeypatch, lambda: push(writer, 3))
    assert undo_deltas(store, "m", to=1, why="", is_alone=True).seq == 4
    assert [delta.reverts_to for delta, _ in line_of(store).deltas()] == [None, None, None, 1]


def test_undo_past_a_version_published_after_the_listing_is_rejected(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch, overwriting_store: None
) -> None:
    """Servers of that version could not follow its line."""
    push(writer, 1)
    push(writer, 2)
    call_after_listing(monkeypatch, lambda: compact_deltas(store, "m", seq=1))
    with pytest.raises(StoreError, match=r"delta 0: expected 1 to 1; .* Version 2 has"):
        undo_deltas(store, "m", to=0, why="", is_alone=True)
    assert line_of(store).seqs() == [1, 2]


def test_undo_retried_after_a_lost_response_is_written_once(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer sends the file again, and the store responds that it exists."""
    push(writer, 1)

    def append_twice(write: Write, delta: DeltaManifest) -> object:
        append(write, delta)
        return append(write, delta)

    monkeypatch.setattr(undo_module, "append", append_twice)
    assert undo(store, 0) == 2
    assert line_of(store).seqs() == [1, 2]


def test_undo_reverts_any_version_to_its_own_rows(
    store: Path, writer: DeltaWriter, make_ebc: Callable[..., Any]
) -> None:
    push(writer, 1)
    push(writer, 2)
    assert undo_deltas(store, "m", to=0, why="", version="1").seq == 3
    writer.resume()
    push(writer, 3)
    assert compact_deltas(store, "m", seq=4).version == 2
    push(writer, 5)
    assert undo_deltas(store, "m", to=4, why="").seq == 6  # undo of version 2
    two = line_of(store, version=2)
    assert ([delta.seq for delta, _ in two.deltas()], [*two.deltas_in_state(6)]) == ([5, 6], [])
    publish(make_ebc(), store, model="m")
    with DeltaWriter(store, model="m") as other:
        push(other, 1)
        assert undo_deltas(store, "m", to=0, why="").line == 3
        assert undo_deltas(store, "m", to=1, why="", version=3).seq == 3


def test_overlong_author_is_rejected_before_any_write(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(writer, 1)
    monkeypatch.setenv("EMBEDSERVE_BY", "x" * 1001)
    with pytest.raises(StoreError, match="writer has 1001 characters, the limit is 1000"):
        undo(store, 0)
    with pytest.raises(StoreError, match="writer has 1001 characters, the limit is 1000"):
        DeltaWriter(store, model="m")
    assert line_of(store).seqs() == [1]
    push(writer, 2)  # a writer's author is set at its start


def test_concurrent_undos_get_distinct_seqs(store: Path, writer: DeltaWriter) -> None:
    for row in range(1, 4):
        push(writer, row)
    seqs: list[int] = []
    threads = [threading.Thread(target=lambda: seqs.append(undo(store, 0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seqs) == [4, 5, 6, 7]
    assert kept_seqs(store, 7) == []


def test_push_after_an_undo_raises_until_resume(store: Path, writer: DeltaWriter) -> None:
    for row in (1, 2, 3):
        push(writer, row)
    undo(store, 1)
    for _ in range(2):
        with pytest.raises(
            RevertedError, match=r"has reverted the line to delta 1 .*: CTR fell"
        ) as e:
            push(writer, 5)
        assert e.value.reverts_to == 1
    writer.resume()
    assert writer.seq == 4
    assert push(writer, 5) == 5
    assert kept_seqs(store, 5) == [5, 1]
    writer.resume()  # nothing was undone
    assert push(writer, 6) == 6


def test_resume_skips_the_writers_own_delta_with_a_lost_response(
    store: Path, writer: DeltaWriter
) -> None:
    """The delta is the writer's own, although the writer does not know that it was written."""
    push(writer, 1)
    with (
        failing_writes(writer, ".json", is_written=True),
        pytest.raises(StoreError, match="the store is away"),
    ):
        push(writer, 2)
    assert writer.seq == 1
    undo(store, 0)
    writer.resume()
    assert writer.seq == 3
    assert push(writer, 2) == 4


def test_old_writer_is_fenced_once_a_new_writer_pushes_after_an_undo(
    store: Path, writer: DeltaWriter
) -> None:
    push(writer, 1)
    push(writer, 2)
    undo(store, 1)
    with DeltaWriter(store, model="m") as other:
        assert push(other, 3) == 4
        with pytest.raises(RevertedError):
            push(writer, 9)
        with pytest.raises(WriterFencedError, match=r"0004.json: .* wrote it"):
            writer.resume()
        with pytest.raises(WriterFencedError):
            push(writer, 9)
