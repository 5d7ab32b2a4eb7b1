"""Tests of a copy of deltas: they are copied in order and whole, and a killed copy can be
continued."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from code_forker import CodeForker
from store.listing import everything_under
from store.remote.conftest import KINDS, Place, Publish
from writable import writable

from embedserve_store import (
    DeltaLine,
    DeltaWriter,
    ModelStore,
    StoreError,
    compact_deltas,
    copy_versions,
)
from embedserve_store.copying import copy_deltas
from embedserve_store.format import delta_file
from embedserve_store.format.delta_manifest import manifest_name
from embedserve_store.publishing.added_file import Write, writer

DELTAS = 3


def push(store: str | Path, count: int = 1, value: float = 1.0, version: int | None = None) -> None:
    """Appends deltas of two rows."""
    with DeltaWriter(store, model="m", version=version, is_alone=True) as writer:
        for _ in range(count):
            rows = np.full((2, 16), value + writer.seq, np.float32)
            writer.push_rows({"t": ([writer.seq, 1000], rows)})


@pytest.fixture
def local(new_version: Publish, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a store in a folder with version 1 of "m" and deltas after it, of two files each."""
    monkeypatch.setattr(delta_file, "FILE_VALUES_BYTES", 1)
    store = new_version().parent.parent
    push(store, DELTAS)
    return store


def seqs(store: str | Path, version: int | None = None) -> list[int]:
    """Reads every byte of the deltas after a version; returns their seqs."""
    models = ModelStore(store)
    line = DeltaLine(models, models.manifest("m", version))
    found = []
    for delta, _ in line.deltas():
        for _ in line.rows(delta):
            pass
        found.append(delta.seq)
    return found


def files(store: str | Path) -> dict[str, bytes]:
    models = ModelStore(store)
    paths = models.files_beside("m", "deltas")
    return {path: models.read(f"m/deltas/{path}") for path in paths}


@pytest.mark.parametrize("source_kind", KINDS)
@pytest.mark.parametrize("target_kind", KINDS)
def test_copy_works_between_stores_of_any_kind(
    local: Path, place: Place, source_kind: str, target_kind: str
) -> None:
    source, target = place(source_kind, "source"), place(target_kind, "target")
    copy_versions(local, source, "m")
    assert copy_versions(source, target, "m").deltas == DELTAS
    assert files(target) == files(local)
    assert copy_versions(source, target, "m").deltas == 0
    push(source, 2)
    assert copy_versions(source, target, "m").deltas == 2
    assert files(target) == files(source)
    assert seqs(target) == [1, 2, 3, 4, 5]


def test_copy_may_omit_deltas(local: Path, tmp_path: Path) -> None:
    assert copy_versions(local, tmp_path / "t", "m", deltas=False).deltas == 0
    assert os.listdir(tmp_path / "t" / "m") == ["1"]


def test_compacted_version_is_copied_with_its_later_deltas(local: Path, tmp_path: Path) -> None:
    compact_deltas(local, "m", seq=2)
    one, both = tmp_path / "one", tmp_path / "both"
    assert copy_versions(local, one, "m", 2).deltas == 1
    assert copy_versions(local, both, "m").deltas == DELTAS
    push(one)  # a training job continues the line after the copied deltas
    assert (seqs(one, 2), seqs(both, 1), seqs(both, 2)) == ([3, 4], [1, 2, 3], [3])
    # The deltas before the version come with the version at which the line begins.
    assert copy_versions(local, one, "m").deltas == 2
    assert seqs(one, 1) == [1, 2, 3, 4]


def test_each_version_is_copied_with_its_delta_line(
    local: Path, new_version: Publish, tmp_path: Path
) -> None:
    new_version(2.0)
    push(local, 2)
    assert copy_versions(local, tmp_path / "first", "m", 1).deltas == DELTAS
    assert copy_versions(local, tmp_path / "t", "m").deltas == DELTAS + 2
    assert (seqs(tmp_path / "t", 1), seqs(tmp_path / "t", 2)) == ([1, 2, 3], [1, 2])


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_delta_pushed_to_both_stores_is_rejected(local: Path, place: Place, kind: str) -> None:
    target = place(kind, "target")
    copy_versions(local, target, "m")
    push(local, 2)
    push(target, 1, value=5.0)
    before = files(target)
    message = rf"target/m/deltas/1/0+4\.json: is another delta 4 of line 1 than that of {local}: "
    with pytest.raises(StoreError, match=message):
        copy_versions(local, target, "m")
    assert files(target) == before


def damage_file(folder: Path) -> None:
    path = min(folder.glob(f"{2:020d}.*.safetensors"))
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def remove_manifest(folder: Path) -> None:
    (folder / manifest_name(2)).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_file, r"local/m/deltas/1/0+2\..*\.safetensors: sha256 is"),
        (remove_manifest, "local/m: delta 2 of line 1 does not exist"),
    ],
)
def test_deltas_before_a_damaged_delta_are_copied(
    local: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(writable(local / "m" / "deltas" / "1"))
    with pytest.raises(StoreError, match=message):
        copy_versions(local, tmp_path / "t", "m")
    assert seqs(tmp_path / "t") == [1]
    events = ModelStore(tmp_path / "t").history("m")
    assert events[0].detail == "line 1, deltas up to 1, 1 copied"


def test_history_records_the_number_of_copied_deltas(local: Path, tmp_path: Path) -> None:
    target = tmp_path / "t"
    copy_versions(local, target, "m", who="ann")
    deltas, version = ModelStore(target).history("m")
    assert (version.what, version.detail) == ("copy", "")
    assert (deltas.what, list(deltas.versions), deltas.who) == ("copy", [1], "ann")
    assert (deltas.source, deltas.detail) == (f"{local}/m", "line 1, deltas up to 3, 3 copied")
    copy_versions(local, target, "m")
    assert len(ModelStore(target).history("m")) == 2


def test_file_missing_in_the_target_is_copied_again(local: Path, tmp_path: Path) -> None:
    target = tmp_path / "t"
    copy_versions(local, target, "m")
    min((target / "m/deltas/1").glob(f"{2:020d}.*.safetensors")).unlink()
    assert copy_versions(local, target, "m").deltas == 1
    assert files(target) == files(local)


def test_damaged_file_of_a_killed_copy_is_named(local: Path, tmp_path: Path) -> None:
    target = tmp_path / "t"
    copy_versions(local, target, "m")
    folder = writable(target / "m/deltas/1")
    damage_file(folder)
    remove_manifest(folder)
    before = everything_under(folder)
    with pytest.raises(StoreError, match=r"t/m/deltas/1/0+2\..*\.safetensors: sha256 is"):
        copy_versions(local, target, "m")
    assert everything_under(folder) == before


def test_deltas_pushed_during_a_copy_are_left_for_the_next_copy(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pushing(store: str, folder: str) -> Write:
        write = writer(store, folder)

        def push_and_write(name: str, data: bytes) -> bool:
            push(local)
            return write(name, data)

        return push_and_write

    target = tmp_path / "t"
    with monkeypatch.context() as patch:
        patch.setattr(copy_deltas, "writer", pushing)
        assert copy_versions(local, target, "m").deltas == DELTAS
    assert seqs(target) == [1, 2, 3]
    assert copy_versions(local, target, "m").deltas == 3 * DELTAS  # one delta for each copied file
    assert files(target) == files(local)


COPY = """
import os, sys
from embedserve_store.copying import copy_deltas
from embedserve_store import copy_versions

real, left = copy_deltas.writer, int(sys.argv[3])

def writer(store, folder):
    write = real(store, folder)

    def killed_write(name, data):
        global left
        if not left:
            os.kill(os.getpid(), 9)
        left -= 1
        return write(name, data)

    return killed_write

copy_deltas.writer = writer
copy_versions(sys.argv[1], sys.argv[2], "m")
"""


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_killed_copy_leaves_complete_deltas_and_continues(
    local: Path, place: Place, kind: str, forking: CodeForker
) -> None:
    """Each copy writes one file, and is killed before the next."""
    target = place(kind, "target")
    copy_versions(local, target, "m", deltas=False)
    found = []
    for _ in range(3 * DELTAS - 1):  # files of rows, and manifests but the last
        assert forking.run(COPY, local, target, 1) == -signal.SIGKILL
        found.append(seqs(target))
    assert found == [[], [], [1], [1], [1], [1, 2], [1, 2], [1, 2]]
    assert copy_versions(local, target, "m").deltas == 1
    assert files(target) == files(local)
