"""Tests of compaction: a version and its deltas become the next version, which has the same
rows."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from store.deltas.conftest import rows
from writable import writable

from embedserve_store import (
    DeltaLine,
    DeltaWriter,
    IdRule,
    ModelStore,
    StoreError,
    TableSpec,
    compact_deltas,
    publish,
    remove_version,
    set_alias,
    undo_deltas,
    verify,
)
from embedserve_store.deltas import compact
from embedserve_store.deltas.compact_ids import write_vocabularies
from embedserve_store.errors import NoRoomError
from embedserve_store.ids.string_hashes import hash_strings
from embedserve_store.parts.part import Part
from embedserve_store.transfer.file_check import IDS

COUNTS = {"user": 300, "item": 77, "tag": 16}


def push_random_rows(store: Path, pushes: int, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    with DeltaWriter(store, model="m") as writer:
        for push in range(pushes):
            chosen = {
                name: random.choice(count, random.integers(1, 9), replace=False)
                for name, count in COUNTS.items()
            }
            writer.push_rows(
                {
                    name: (ids, rows(name, len(ids), 100 * seed + push))
                    for name, ids in chosen.items()
                }
            )


def replayed_rows(store: Path, base: int, seq: int) -> dict[str, NDArray[np.uint8]]:
    """Returns the rows of version ``base`` after its deltas up to ``seq``, applied row by row."""
    models = ModelStore(store)
    version = models.load("m", base)
    found = {name: version.tables.rows(name).copy() for name in COUNTS}
    line = DeltaLine(models, version.manifest)
    for delta, _ in line.deltas(seq):
        for changes in line.rows(delta):
            for change in changes:
                for number, value in zip(change.numbers, change.values, strict=True):
                    found[change.table.name][number] = value
    return found


def rows_of(store: Path, version: int) -> dict[str, NDArray[np.uint8]]:
    opened = ModelStore(store).load("m", version)
    return {name: opened.tables.rows(name) for name in COUNTS}


def test_compacted_version_has_the_rows_of_its_deltas(store: Path) -> None:
    push_random_rows(store, 5)
    expected = replayed_rows(store, 1, 5)
    made = compact_deltas(store, "m")
    assert (made.version, made.manifest.source["line"], made.manifest.source["line_seq"]) == (
        2,
        1,
        5,
    )
    opened = ModelStore(store).load("m")
    verify(opened)
    np.testing.assert_equal(rows_of(store, 2), expected)
    assert opened.plan == ModelStore(store).load("m", 1).plan
    assert not np.array_equal(
        opened.goldens().stored_answers, ModelStore(store).load("m", 1).goldens().stored_answers
    )


@pytest.mark.parametrize("seq", [1, 3])
def test_compaction_then_deltas_equals_applying_all_deltas(store: Path, seq: int) -> None:
    push_random_rows(store, 5)
    compact_deltas(store, "m", seq=seq)
    push_random_rows(store, 2, seed=1)  # continues the line after delta 5, from version 2
    assert DeltaLine(ModelStore(store), ModelStore(store).manifest("m")).seqs() == [
        *range(seq + 1, 8)
    ]
    expected = replayed_rows(store, 1, 7)
    np.testing.assert_equal(replayed_rows(store, 2, 7), expected)
    compact_deltas(store, "m")
    np.testing.assert_equal(rows_of(store, 3), expected)
    remove_version(store, "m", 1)
    np.testing.assert_equal(replayed_rows(store, 2, 7), expected)


def test_parts_are_kept_with_checksums_of_the_new_rows(
    tmp_path: Path, make_ebc: Callable[..., Any]
) -> None:
    store = tmp_path / "own"
    before = publish(make_ebc(), store, model="m", hosts=3)
    push_random_rows(store, 3)
    made = compact_deltas(store, "m")
    assert made.plan.hosts == before.plan.hosts
    assert made.manifest.part_checksums.keys() == before.manifest.part_checksums.keys()
    assert made.manifest.part_checksums != before.manifest.part_checksums
    for number in range(3):
        verify(ModelStore(store, selection=Part(number, 3)).load("m"))


def test_compacted_version_keeps_its_vocabularies(
    tmp_path: Path, make_ebc: Callable[..., Any]
) -> None:
    store = tmp_path / "own"
    rules = {"user": IdRule("map", id_type="string"), "tag": IdRule("modulo")}
    words = [f"w{i}" for i in range(300)]
    # "tag" and "item" share a feature, so they have one rule.
    rules["item"] = rules["tag"] = IdRule("modulo", modulus=16)
    publish(make_ebc(), store, model="m", ids=rules, vocabularies={"user": words})
    with DeltaWriter(store, model="m") as writer:
        writer.push_rows({"user": (["w7"], rows("user", 1)), "tag": ([3], rows("tag", 1))})
    compact_deltas(store, "m")
    opened = ModelStore(store).load("m")
    verify(opened)
    np.testing.assert_array_equal(
        opened.tables.rows("user")[7].view(np.float32), rows("user", 1)[0]
    )


def test_compaction_without_new_deltas_is_rejected(store: Path) -> None:
    with pytest.raises(StoreError, match="no delta after version 1: nothing to compact"):
        compact_deltas(store, "m")
    push_random_rows(store, 1)
    compact_deltas(store, "m")
    with pytest.raises(StoreError, match="no delta after version 2: nothing to compact"):
        compact_deltas(store, "m")
    with pytest.raises(StoreError, match="delta 2 of line 1 does not exist"):
        compact_deltas(store, "m", version=1, seq=2)
    assert ModelStore(store).versions("m") == [1, 2]


def test_deltas_already_in_the_version_are_not_compacted_again(store: Path) -> None:
    push_random_rows(store, 3)
    compact_deltas(store, "m")
    push_random_rows(store, 1, seed=1)
    set_alias(store, "m", "held", 2, at_seq=3)
    cases: list[tuple[int, dict[str, Any]]] = [
        (1, {"seq": 1}),
        (3, {"seq": 3}),
        (3, {"version": "held"}),
    ]
    for seq, options in cases:
        message = f"m: seq is {seq}, but version 2 has the deltas up to 3: nothing to compact"
        with pytest.raises(StoreError, match=message):
            compact_deltas(store, "m", **options)
    assert ModelStore(store).versions("m") == [1, 2]
    assert compact_deltas(store, "m", version="held", seq=4).version == 3


def test_deltas_undone_during_compaction_are_not_published(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers could not follow the line from a version that has the rows of undone deltas."""
    push_random_rows(store, 3)

    def undo_before(*arguments: Any) -> tuple[TableSpec, ...]:
        undo_deltas(store, "m", to=1, why="", version=1)
        return write_vocabularies(*arguments)

    monkeypatch.setattr(compact, "write_vocabularies", undo_before)
    with pytest.raises(StoreError, match="delta 3 of line 1 was undone: delta 4 reverts to 1;"):
        compact_deltas(store, "m")
    assert ModelStore(store).versions("m") == [1]
    assert not [*store.glob("m/.staging*")]


def test_deltas_undone_during_upload_are_not_published(store: Path, tmp_path: Path) -> None:
    push_random_rows(store, 3)
    url, undone = f"file://{store}", list[int]()
    models = ModelStore(url, tmp_path / "cache")

    def undo_once(file: str, bytes_done: int, bytes_total: int) -> None:
        if not undone:
            undone.append(undo_deltas(store, "m", to=1, why="", version=1).seq)

    with pytest.raises(StoreError, match="delta 3 of line 1 was undone: delta 4 reverts to 1;"):
        compact_deltas(url, "m", cache=tmp_path / "cache", upload_progress=undo_once)
    assert (undone, models.versions("m")) == ([4], [1])
    made = compact_deltas(url, "m", cache=tmp_path / "cache")
    assert made.manifest.source["line_seq"] == 4


def test_damaged_version_or_delta_is_not_compacted(store: Path, tmp_path: Path) -> None:
    """Compaction must not give a damaged byte a new, valid checksum."""
    push_random_rows(store, 2)
    models = ModelStore(store)
    for damaged in (
        "m/1/tables.safetensors",
        next((store / "m/deltas/1").glob("*2.*.safetensors")),
    ):
        other = writable(shutil.copytree(store, tmp_path / "damaged"))
        path = other / (damaged if isinstance(damaged, str) else damaged.relative_to(store))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
        with pytest.raises(StoreError, match="sha256 is"):
            compact_deltas(other, "m")
        assert ModelStore(other).versions("m") == [1]
        assert not [*other.glob("m/.staging*")]
        shutil.rmtree(other)
    assert models.versions("m") == [1]


def test_compacted_vocabulary_has_new_ids_and_removed_ids_are_no_examples(tmp_path: Path) -> None:
    weights = {"ebc.embedding_bags.t.weight": torch.zeros(3, 4)}
    rule = IdRule("map", id_type="string")
    tables = [TableSpec("t", 3, 4, ("f",), "sum", "float32", ids=rule)]
    publish(weights, tmp_path, model="m", tables=tables, vocabularies={"t": ["a", "b", "c"]})
    assert ModelStore(tmp_path).manifest("m").tables[0].ids.examples == ("a", "b", "c")
    with DeltaWriter(tmp_path, model="m") as writer:
        writer.push_rows({}, removed={"t": ["a"]})
        writer.push_rows({"t": (["d"], np.ones((1, 4), np.float32))})
    compact_deltas(tmp_path, "m")
    version = ModelStore(tmp_path).load("m", 2)
    found = version.id_maps["t"].rows_of(hash_strings(["a", "b", "c", "d"]))
    assert found.tolist() == [-1, 1, 2, 0]
    assert version.manifest.tables[0].ids.examples == ("b", "c")


@pytest.mark.parametrize("pushed", [0, 9999])
def test_damaged_vocabulary_is_not_compacted(tmp_path: Path, pushed: int) -> None:
    """Whether the vocabulary is copied, or written anew with the id 9999."""
    weights = {"ebc.embedding_bags.t.weight": torch.zeros(5000, 4)}
    tables = [TableSpec("t", 5000, 4, ("f",), "sum", "float32", ids=IdRule("map"))]
    publish(weights, tmp_path, model="m", tables=tables, vocabularies={"t": range(4000)})
    with DeltaWriter(tmp_path, model="m") as writer:
        writer.push_rows({"t": ([pushed], np.ones((1, 4), np.float32))})
    golden_ids = ModelStore(tmp_path).load("m").goldens().bags.ids.tolist()
    damaged = max({*range(4000)}.difference(golden_ids))
    path = writable(tmp_path) / "m/1" / IDS
    data = path.read_bytes()
    path.write_bytes(data.replace(np.int64(damaged).tobytes(), np.int64(8888).tobytes()))
    with pytest.raises(StoreError, match="table 't': sha256 is"):
        compact_deltas(tmp_path, "m")
    assert ModelStore(tmp_path).versions("m") == [1]


def test_full_disk_names_the_file_that_was_written(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))

    push_random_rows(store, pushes=1)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(NoRoomError, match=r"No space left on device \(.*/.staging-.*/plan.json\)"):
        compact_deltas(store, "m")
