"""Tests of a copy of versions: it is whole or invisible, can be continued after a kill, and
replaces nothing."""

import errno
import fcntl
import io
import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import s3fs
from code_forker import CodeForker
from store.listing import everything_under
from store.remote.conftest import KINDS, Place, Publish, publish_rows
from writable import writable

from embedserve_store.copying import copy_versions as copying
from embedserve_store.copying.copy_versions import CopiedModel, copy_versions
from embedserve_store.errors import StoreError, UnreachableError
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.add_note import add_note
from embedserve_store.publishing.added_file import Write, writer
from embedserve_store.publishing.remove_versions import remove_version
from embedserve_store.publishing.set_alias import set_alias
from embedserve_store.remote import remote_files
from embedserve_store.transfer import receive, stored_version
from embedserve_store.verification import verify
from embedserve_store.writing import direct_file, staging

ROWS = 25_000
"""Rows of a table of 1.6 MB: several parts of PART_BYTES, each with several blocks of
BLOCK_BYTES."""
PART_BYTES = 512_000
BLOCK_BYTES = 100_000


@pytest.fixture
def local(new_version: Publish) -> Path:
    """Returns a store in a folder with versions 1 and 2 of "m", a note and aliases."""
    store = new_version().parent.parent
    new_version(2.0)
    add_note(store, "m", 1, "the first")
    set_alias(store, "m", "stable", 1, why="begin")
    set_alias(store, "m", "stable", 2)
    set_alias(store, "m", "old", 1)
    return store


def check_same(one: str | Path, other: str | Path, cache: Path) -> None:
    stores = [ModelStore(where, cache / str(i)) for i, where in enumerate((one, other))]
    for number in stores[0].versions("m"):
        manifests = {store.stored("m", number).manifest_json for store in stores}
        assert len(manifests) == 1
        verify(stores[1].load("m", number))
        assert stores[0].notes("m", number) == stores[1].notes("m", number)


@pytest.mark.parametrize("source_kind", KINDS)
@pytest.mark.parametrize("target_kind", KINDS)
def test_copy_works_between_stores_of_any_kind(
    local: Path, place: Place, source_kind: str, target_kind: str, tmp_path: Path
) -> None:
    source, target = place(source_kind, "source"), place(target_kind, "target")
    copy_versions(local, source, "m", aliases=True)
    copied = copy_versions(source, target, "m", aliases=True)
    assert (copied.copied, copied.present, copied.notes) == ([1, 2], [], 1)
    assert copied.aliases == ["old", "stable"]
    check_same(local, target, tmp_path / "caches")
    history = ModelStore(local).alias_history("m", "stable")
    assert ModelStore(target).alias_history("m", "stable") == history
    again = copy_versions(source, target, "m", aliases=True)
    assert (again.copied, again.present, again.notes) == ([], [1, 2], 0)


def test_one_version_is_copied_by_its_alias(local: Path, tmp_path: Path) -> None:
    copied = copy_versions(local, tmp_path / "t", "m", "old", aliases=True)
    assert (copied.copied, copied.aliases, copied.left_out) == ([1], ["old"], ["stable"])
    assert list(ModelStore(tmp_path / "t").aliases("m")) == ["old"]
    assert sorted(os.listdir(tmp_path / "t" / "m")) == ["1", "aliases", "notes"]


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_other_version_under_the_same_number_is_rejected(
    local: Path, new_version: Publish, place: Place, kind: str, tmp_path: Path
) -> None:
    target = place(kind, "target")
    publish_rows(tmp_path / "other", 9.0, 2000)
    copy_versions(tmp_path / "other", target, "m")
    message = f"target/m/1: is another version than {local}/m/1: published .*, not .*; versions"
    with pytest.raises(StoreError, match=message):
        copy_versions(local, target, "m", 1)
    assert ModelStore(target, tmp_path / "c").load("m", 1).tables.rows("t")[1].view("<f4")[0] == 9


def test_alias_changed_in_both_stores_is_rejected(local: Path, tmp_path: Path) -> None:
    target = tmp_path / "t"
    copy_versions(local, target, "m")
    set_alias(target, "m", "stable", 1, why="mine")
    before = everything_under(target)
    message = r"t/m/aliases/stable/1\.json: is another than that of .*: it was added in both stores"
    with pytest.raises(StoreError, match=message):
        copy_versions(local, target, "m", aliases=True)
    assert everything_under(target) == before


def test_copies_at_the_same_time_without_file_locks_are_apart(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    target = tmp_path / "t"
    others: list[CopiedModel] = []

    def copy_first(file: str, bytes_done: int, bytes_total: int) -> None:
        if file == "tables.safetensors" and not others:
            others.append(CopiedModel("m", [], []))  # the copy below has progress, too
            others.append(copy_versions(local, target, "m", 1, progress=copy_first))

    copied = copy_versions(local, target, "m", 1, progress=copy_first)
    assert (copied.present, others[1].copied) == ([1], [1])
    assert sorted(os.listdir(target / "m")) == ["1", "notes"]
    verify(ModelStore(target).load("m", 1))


def test_folder_of_another_version_is_not_copied(local: Path, tmp_path: Path) -> None:
    shutil.copytree(local / "m" / "2", local / "m" / "3")
    with pytest.raises(StoreError, match="lies in the folder of 'm' version 3"):
        copy_versions(str(local), str(tmp_path / "target"), "m", 3)


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_damaged_version_is_not_copied(local: Path, place: Place, kind: str) -> None:
    path = writable(local / "m" / "1") / "tables.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    target = place(kind, "target")
    with pytest.raises(StoreError, match=r"local/m/1/tables\.safetensors: table 't': sha256"):
        copy_versions(local, target, "m")
    assert ModelStore(target).versions("m") == [2]


def test_newest_version_is_copied_first(local: Path, new_version: Publish, tmp_path: Path) -> None:
    new_version(3.0)
    target = tmp_path / "t"
    there: list[set[str]] = []

    def progress(file: str, bytes_done: int, bytes_total: int) -> None:
        there.append({path.name for path in (target / "m").glob("[0-9]")})

    assert copy_versions(local, target, "m", progress=progress).copied == [1, 2, 3]
    assert [one for i, one in enumerate(there) if one not in there[:i]] == [
        set(),
        {"3"},
        {"1", "3"},
    ]
    copies = reversed(ModelStore(target).history("m"))
    assert [(one.what, one.versions) for one in copies] == [
        ("copy", [3]),
        ("copy", [1]),
        ("copy", [2]),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_version_removed_meanwhile_is_left_out(local: Path, place: Place, kind: str) -> None:
    source, target = place(kind, "source"), place("folder", "target")
    copy_versions(local, source, "m")

    def remove_first(file: str, bytes_done: int, bytes_total: int) -> None:
        if len(ModelStore(source).versions("m")) == 2:
            remove_version(source, "m", 1)

    copied = copy_versions(source, target, "m", progress=remove_first)
    assert (copied.copied, copied.present, copied.notes) == ([2], [], 0)


@pytest.mark.parametrize("writes", [1, 4, 7])
def test_alias_changes_directly_to_its_latest_state(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    target = tmp_path / "t"
    copy_versions(local, target, "m", aliases=True)
    for version in (None, 2, 1):
        set_alias(local, "m", "stable", version)
    for version in (2, 1, None):
        set_alias(local, "m", "old", version)
    set_alias(local, "m", "new", 1)
    set_alias(local, "m", "new", 2)
    seen: list[dict[str, int | None]] = []

    def cut_after_writes(store: str, folder: str) -> Write:
        write = writer(store, folder)

        def write_or_fail(name: str, data: bytes) -> bool:
            if len(seen) == writes:
                raise UnreachableError("cut off")
            is_new = write(name, data)
            aliases = ModelStore(store).aliases("m")
            seen.append({name: one.version for name, one in aliases.items()})
            return is_new

        return write_or_fail

    with monkeypatch.context() as patched:
        patched.setattr(copying, "writer", cut_after_writes)
        with pytest.raises(UnreachableError, match="cut off"):
            copy_versions(local, target, "m", aliases=True)
    assert len(seen) == writes
    assert {one.get("stable", 0) for one in seen} <= {2, 1}
    assert {one.get("old") for one in seen} <= {1, None}
    assert {one.get("new") for one in seen} <= {None, 2}
    last = {"stable": 1, "old": None, "new": 2}
    assert all({name: one.get(name) for name in last} == last for one in seen[3:])
    copy_versions(local, target, "m", aliases=True)
    for name in last:
        changes = ModelStore(local).alias_history("m", name)
        assert ModelStore(target).alias_history("m", name) == changes


def test_full_disk_is_named_and_copy_continues_once_there_is_space(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "t"
    free = shutil.disk_usage(tmp_path)._replace(free=100_000)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: free)
        with pytest.raises(StoreError, match=r"t/m: the version needs [\d,]+ bytes, the disk has"):
            copy_versions(local, target, "m")
    assert not (target / "m").exists()
    assert copy_versions(local, target, "m").copied == [1, 2]


class FullDisk(io.FileIO):
    """A disk that is full after a block."""

    def write(self, data: Any) -> int:
        if self.tell() >= BLOCK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(memoryview(data)[:BLOCK_BYTES])


def test_disk_that_fills_up_during_a_copy_is_named(
    new_version: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = new_version(1.0, ROWS).parent.parent, tmp_path / "t"
    with monkeypatch.context() as patched:
        patched.setattr(stored_version, "BLOCK_BYTES", BLOCK_BYTES)
        patched.setattr(
            direct_file, "open", lambda path, mode: FullDisk(path, mode.rstrip("b")), raising=False
        )
        with pytest.raises(StoreError, match=r"t/m/1: copying failed: No space left on device"):
            copy_versions(source, target, "m")
    assert ModelStore(target).models() == []
    copy_versions(source, target, "m")
    check_same(source, target, tmp_path / "cache")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only folders")
def test_read_only_folder_is_named(local: Path, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="t/m: cannot be written: no permission"):
        copy_versions(local, tmp_path / "t", "m")


COPY = """
import os, sys
from embedserve_store.copying.copy_versions import copy_versions
from embedserve_store.remote import remote_files
from embedserve_store.transfer import receive, stored_version
from embedserve_store.writing import direct_file

direct_file.BUFFER_BYTES = receive.BUFFER_BYTES = int(sys.argv[5])
remote_files.PARTS_AT_ONCE = 1
remote_files.PART_BYTES = int(sys.argv[4])
stored_version.BLOCK_BYTES = int(sys.argv[5])
left = int(sys.argv[3])

def progress(file, bytes_done, bytes_total):
    global left
    left -= file == "tables.safetensors"
    if not left:
        os.kill(os.getpid(), 9)

copy_versions(sys.argv[1], sys.argv[2], "m", progress=progress)
"""


def killed_copy(forking: CodeForker, source: str | Path, target: str | Path, blocks: int) -> None:
    """Copies, and is killed at the ``blocks``-th block of the tables."""
    killed = forking.run(COPY, source, target, blocks, PART_BYTES, BLOCK_BYTES)
    assert killed == -signal.SIGKILL


def kept_bytes(source: Path, target: Path, patched: pytest.MonkeyPatch) -> list[int]:
    """Copies, and returns how many bytes of the tables were kept at each attempt to write them."""
    opened = Mock(side_effect=direct_file.new_file)
    patched.setattr(receive, "BUFFER_BYTES", BLOCK_BYTES)
    patched.setattr(receive, "new_file", opened)
    copy_versions(source, target, "m")
    calls = (call.args for call in opened.call_args_list)
    return [kept for path, _, kept in calls if path.name == "tables.safetensors"]


def test_killed_copy_to_a_folder_continues(
    new_version: Publish, tmp_path: Path, forking: CodeForker, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = new_version(1.0, ROWS).parent.parent, tmp_path / "t"
    for blocks in (2, 11, 14):
        killed_copy(forking, source, target, blocks)
        assert ModelStore(target).models() == []
    (left,) = target.glob("m/.copy-1-*/m/1/tables.safetensors")
    assert left.stat().st_size >= 13 * BLOCK_BYTES
    expected = left.stat().st_size // BLOCK_BYTES * BLOCK_BYTES
    assert kept_bytes(source, target, monkeypatch) == [expected]
    check_same(source, target, tmp_path / "cache")
    assert os.listdir(target / "m") == ["1"]


def test_leftovers_of_a_killed_copy_are_verified(
    new_version: Publish, tmp_path: Path, forking: CodeForker, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = new_version(1.0, ROWS).parent.parent, tmp_path / "t"
    killed_copy(forking, source, target, 12)
    (left,) = target.glob("m/.copy-1-*/m/1/tables.safetensors")
    with left.open("r+b") as file:
        file.seek(5000)
        file.write(b"damaged")
    kept, anew = kept_bytes(source, target, monkeypatch)
    assert kept > anew == 0
    check_same(source, target, tmp_path / "cache")


def test_killed_copy_to_s3_continues(
    new_version: Publish,
    url: str,
    root: str,
    objects: s3fs.S3FileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forking: CodeForker,
) -> None:
    source = new_version(1.0, ROWS).parent.parent
    killed_copy(forking, source, url, 13)
    assert [name for name in objects.find(root) if "/m/" in name] == []
    monkeypatch.setattr(remote_files, "PART_BYTES", PART_BYTES)
    call = remote_files.RemoteFolder.s3_call
    with patch.object(remote_files.RemoteFolder, "s3_call", autospec=True, side_effect=call) as s3:
        copy_versions(source, url, "m")
    calls = [one for one in s3.call_args_list if one.args[1] == "upload_part"]
    sent = [one.kwargs["PartNumber"] for one in calls]
    assert sent
    assert min(sent) > 1
    check_same(source, url, tmp_path / "cache")


def test_uploaded_parts_with_other_bytes_are_not_reused(
    new_version: Publish,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forking: CodeForker,
) -> None:
    source = new_version(1.0, ROWS).parent.parent
    killed_copy(forking, source, url, 13)
    other = tmp_path / "other"
    publish_rows(other, 5.0, ROWS)
    monkeypatch.setattr(remote_files, "PART_BYTES", PART_BYTES)
    copy_versions(other, url, "m")
    check_same(other, url, tmp_path / "cache")


def test_abandoned_copy_is_removed(
    new_version: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forking: CodeForker
) -> None:
    source, target = new_version(1.0, ROWS).parent.parent, tmp_path / "t"
    killed_copy(forking, source, target, 12)
    copy_versions(publish_as(tmp_path / "second", 2), target, "m")
    assert list(target.glob("m/.copy-1-*"))
    monkeypatch.setattr(staging, "COPY_KEPT_S", 0.0)
    copy_versions(publish_as(tmp_path / "third", 3), target, "m")
    assert sorted(os.listdir(target / "m")) == ["2", "3"]


def publish_as(store: Path, number: int) -> Path:
    """Returns a folder with one version of "m", which has this number."""
    for _ in range(number):
        publish_rows(store, 1.0, 20)
    for one in range(1, number):
        shutil.rmtree(store / "m" / str(one))
    return store


def test_missing_model_is_named(local: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no model 'x'; models are m"):
        copy_versions(local, tmp_path / "t", "x")
    with pytest.raises(StoreError, match="version 7 does not exist; versions are 1, 2"):
        copy_versions(local, tmp_path / "t", "m", 7)
    assert not (tmp_path / "t").exists()
