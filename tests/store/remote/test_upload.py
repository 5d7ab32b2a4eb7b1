"""Tests of an upload: its last file makes it visible, and it never replaces a version."""

import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import s3fs
from store.one_table import STATE, TABLES, publish_versions
from store.remote.conftest import Publish
from writable import writable

from embedserve_store.errors import InvalidModelError, StoreError, UnreachableError
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.add_note import add_note
from embedserve_store.publishing.publish import publish
from embedserve_store.publishing.set_alias import set_alias
from embedserve_store.remote import remote_files
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.remote.remote_store import RemoteStore
from embedserve_store.remote.upload import upload_version
from embedserve_store.verification import verify

TIMEOUT_S = 300


def notify_of_files(patch: pytest.MonkeyPatch, written: Callable[[str], object]) -> None:
    """Makes every upload call ``written`` with the name of each file that it has written."""
    upload, write_new = RemoteFolder.upload, RemoteFolder.write_new

    def upload_and_notify(remote: RemoteFolder, name: str, blocks: Iterator[bytes]) -> None:
        upload(remote, name, blocks)
        written(Path(name).name)

    def write_and_notify(remote: RemoteFolder, name: str, data: bytes) -> bool:
        is_new = write_new(remote, name, data)
        written(Path(name).name)
        return is_new

    patch.setattr(RemoteFolder, "upload", upload_and_notify)
    patch.setattr(RemoteFolder, "write_new", write_and_notify)


def test_manifest_is_uploaded_last(
    new_version: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[int]]] = []
    store = RemoteStore(f"file://{tmp_path}/far", tmp_path / "cache")
    notify_of_files(monkeypatch, lambda name: seen.append((name, store.versions("m"))))
    upload_version(new_version(), f"file://{tmp_path}/far")
    assert seen == [
        ("plan.json", []),
        ("goldens.safetensors", []),
        ("tables.safetensors", []),
        ("manifest.json", [1]),
    ]


def test_existing_number_is_rejected_and_its_version_unchanged(
    store: RemoteStore, uploaded: Path, new_version: Publish, url: str
) -> None:
    with pytest.raises(StoreError, match=f"{url}/m/1: exists already, and versions never change"):
        upload_version(new_version(9), url, 1)
    assert store.load("m").tables.rows("t")[1].view("<f4")[0] == 1


def test_new_number_is_written_into_the_sealed_manifest(
    store: RemoteStore, uploaded: Path, url: str
) -> None:
    assert upload_version(uploaded, url, store.next_version("m")) == f"{url}/m/2"
    loaded = store.load("m", 2)
    verify(loaded)
    assert loaded.manifest.version == 2


def test_interrupted_upload_is_invisible_and_can_be_repeated(
    new_version: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(name: str) -> None:
        if name == "tables.safetensors":
            raise KeyboardInterrupt

    url = f"file://{tmp_path}/far"
    folder, store = new_version(), RemoteStore(url, tmp_path / "cache")
    with monkeypatch.context() as patch:
        notify_of_files(patch, interrupt)
        with pytest.raises(KeyboardInterrupt):
            upload_version(folder, url)
    assert (store.versions("m"), store.next_version("m")) == ([], 2)
    upload_version(folder, url)
    assert store.versions("m") == [1]
    store.load("m")


@pytest.mark.parametrize("part_bytes", [remote_files.PART_BYTES, 10_000])
def test_damaged_version_is_not_uploaded(
    new_version: Publish,
    url: str,
    objects: s3fs.S3FileSystem,
    root: str,
    monkeypatch: pytest.MonkeyPatch,
    part_bytes: int,
) -> None:
    """An upload in parts is aborted, so that the next one does not find its parts."""
    monkeypatch.setattr(remote_files, "PART_BYTES", part_bytes)
    folder = writable(new_version())
    with (folder / "tables.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    call = RemoteFolder.s3_call
    with (
        patch.object(RemoteFolder, "s3_call", autospec=True, side_effect=call) as s3,
        pytest.raises(StoreError, match=r"tables\.safetensors: table 't': sha256"),
    ):
        upload_version(folder, url)
    assert [name for name in objects.find(root) if "/m/" in name] == []
    aborted = [one for one in s3.call_args_list if one.args[1] == "abort_multipart_upload"]
    assert len(aborted) == (part_bytes == 10_000)


def test_folder_without_a_version_is_rejected(tmp_path: Path, url: str) -> None:
    for folder, message in (
        (tmp_path / "latest", "its name is not a number"),
        (tmp_path / "m" / "1", "there is no model 'm'; models are none"),
    ):
        with pytest.raises(StoreError, match=message):
            upload_version(folder, url)


def test_missing_bucket_is_not_created(new_version: Publish, objects: s3fs.S3FileSystem) -> None:
    with pytest.raises(StoreError, match="s3://no-such-bucket-here/m/1"):
        upload_version(new_version(), "s3://no-such-bucket-here")
    assert "no-such-bucket-here" not in objects.ls("")


def test_progress_ends_at_each_files_size(new_version: Publish, url: str) -> None:
    folder = new_version()
    done: dict[str, tuple[int, int]] = {}
    upload_version(folder, url, progress=lambda file, *counts: done.update({file: counts}))
    assert done == {
        path.name: (path.stat().st_size,) * 2
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }


@pytest.mark.parametrize("scheme", ["s3", "file"])
def test_publishing_to_a_url_uploads_the_next_version(
    scheme: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    where = url if scheme == "s3" else f"file://{tmp_path}/far"
    reported_files: list[str] = []
    for number in (1, 2):
        published = publish_versions(
            where, upload_progress=lambda file, *_: reported_files.append(file)
        )
        assert (published.version, published.manifest.version) == (number, number)
        assert published.where == f"{where}/m/{number}"
        with pytest.raises(ValueError, match="is not a folder"):
            _ = published.path
    assert (
        scheme == "file" or "tables.safetensors" in reported_files
    )  # fsspec reports no progress of files
    store = ModelStore(where, tmp_path / "cache")
    assert (store.is_remote, store.models(), store.versions("m")) == (True, ["m"], [1, 2])
    assert store.manifest("m") == published.manifest
    assert not (tmp_path / "cache").exists()
    verify(store.load("m"))
    assert [path.name for path in tmp_path.iterdir() if ":" in path.name] == []


def value_of(url: str, cache: Path, version: int) -> float:
    loaded = RemoteStore(url, cache).load("m", version)
    verify(loaded)
    return float(loaded.tables.rows("t")[0].view("<f4")[0])


@pytest.mark.parametrize("moment", ["progress", "upload_progress"])
@pytest.mark.parametrize("scheme", ["s3", "file"])
def test_concurrent_publisher_gets_another_number(
    scheme: str, moment: str, url: str, tmp_path: Path
) -> None:
    where = url if scheme == "s3" else f"file://{tmp_path}/far"
    others: list[int] = []

    def publish_another(*_: Any) -> None:
        if not others:
            others.append(0)
            others.append(publish_versions(where, value=2).version)

    options: dict[str, Any] = {moment: publish_another}
    number = publish_versions(where, **options).version
    assert sorted([number, others[-1]]) == [1, 2] == ModelStore(where).versions("m")
    values = {number: 1, others[-1]: 2}
    assert {n: value_of(where, tmp_path / "cache", n) for n in values} == values
    assert ModelStore(where).files_beside("m", ".uploads") == []


def test_concurrent_publishers_get_distinct_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, count = f"file://{tmp_path}/far", 3
    all_read, real = threading.Barrier(count, timeout=TIMEOUT_S), RemoteStore.next_version

    def next_version(store: RemoteStore, model: str) -> int:
        number = real(store, model)
        all_read.wait()
        return number

    writing, write = threading.Lock(), RemoteFolder.write_new

    def write_new(remote: RemoteFolder, name: str, data: bytes) -> bool:
        with writing:  # makes the write atomic, which file:// does not do
            return write(remote, name, data)

    monkeypatch.setattr(RemoteStore, "next_version", next_version)
    monkeypatch.setattr(RemoteFolder, "write_new", write_new)

    values = [1.0, 2.0, 3.0]
    with ThreadPoolExecutor(count) as pool:
        published = pool.map(lambda value: publish_versions(where, value=value), values)
        numbers = [one.version for one in published]
    assert sorted(numbers) == [1, 2, 3] == ModelStore(where).versions("m")
    assert [value_of(where, tmp_path / "cache", number) for number in numbers] == values


def test_second_upload_under_the_same_number_fails(
    new_version: Publish, url: str, store: RemoteStore
) -> None:
    folders = [new_version(), new_version(2)]
    done: list[str] = []

    def upload_other() -> None:
        if not done:
            done.append("")
            upload_version(folders[0], url, 1)

    with pytest.raises(StoreError, match=f"{url}/m/1: exists already"):
        upload_version(folders[1], url, 1, lambda *_: upload_other())
    assert store.versions("m") == [1]
    verify(store.load("m", 1))


def test_retried_manifest_write_is_no_conflict(
    new_version: Publish, url: str, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first response was lost, so the client sends the file again, and the store responds that
    it exists."""
    real = RemoteFolder.write_new

    def write_twice(remote: RemoteFolder, name: str, data: bytes) -> bool:
        real(remote, name, data)
        return real(remote, name, data)

    monkeypatch.setattr(RemoteFolder, "write_new", write_twice)
    upload_version(new_version(), url)
    assert store.versions("m") == [1]


def test_claim_of_a_killed_publisher_is_continued_only_with_the_same_rows(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = Mock(side_effect=UnreachableError("denied"))

    def publish_and_die(value: float) -> None:
        with monkeypatch.context() as killed:
            killed.setattr(RemoteFolder, "remove", remove)
            with pytest.raises(KeyboardInterrupt):
                publish_versions(
                    url, value=value, upload_progress=Mock(side_effect=KeyboardInterrupt)
                )

    models = ModelStore(url)
    publish_and_die(1)
    assert models.files_beside("m", ".uploads") == ["1"]
    assert (models.versions("m"), models.models()) == ([], [])
    assert publish_versions(url).version == 1
    assert models.files_beside("m", ".uploads") == []
    publish_and_die(2)
    assert publish_versions(url, value=3).version == 3
    assert models.versions("m") == [1, 3]
    assert models.files_beside("m", ".uploads") == ["2"]


def test_other_layout_is_rejected_before_the_upload(url: str) -> None:
    publish_versions(url)
    mean = [replace(table, pooling="mean") for table in TABLES]
    with pytest.raises(InvalidModelError, match=r"than version 1: key 't': pooling sum to mean"):
        publish(STATE, url, model="m", tables=mean)
    assert ModelStore(url).versions("m") == [1]
    assert publish(STATE, url, model="m", tables=mean, layout_changed=True).version == 2


@pytest.mark.parametrize("scheme", ["s3", "file"])
def test_alias_in_a_remote_store_is_changed_and_followed(
    scheme: str, url: str, tmp_path: Path
) -> None:
    where = url if scheme == "s3" else f"file://{tmp_path}/far"
    publish_versions(where, 2)
    store = ModelStore(where, tmp_path / "cache")
    assert store.aliases("m") == {}
    set_alias(where, "m", "stable", 1, why="first")
    set_alias(where, "m", "stable", 2)
    assert [one.version for one in store.alias_history("m", "stable")] == [2, 1]
    assert store.load("m", "stable").manifest.version == 2
    set_alias(where, "m", "stable", None)
    assert store.aliases("m") == {}
    assert (store.models(), store.versions("m")) == (["m"], [1, 2])
    with pytest.raises(StoreError, match="'stable' is no version and no alias"):
        store.load("m", "stable")


def test_notes_are_kept_in_a_remote_store(url: str, tmp_path: Path) -> None:
    publish_versions(url, 2)
    store = ModelStore(url, tmp_path / "cache")
    assert store.notes("m", 1) == []
    notes = [add_note(url, "m", 1, text) for text in ("recall is up", "and down")]
    assert store.notes("m", 1) == notes
    assert [one.number for one in notes] == [1, 2]
    assert store.notes("m", 2) == []
    assert (store.models(), store.versions("m")) == (["m"], [1, 2])
    assert store.load("m", 1).manifest.version == 1


def test_alias_change_is_retried_after_a_failed_precondition(
    url: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raises s3fs's error for a failed precondition, because this server has no conditional
    writes."""
    publish_versions(url)
    files = RemoteFolder(url)._files  # shared by all that open this URL
    write = files._pipe_file
    others: list[str] = []

    async def pipe_file(path: str, value: bytes, mode: str) -> None:
        await write(path, value)
        if not others:
            others.append(path)
            raise OSError(errno.EINVAL, "At least one of the pre-conditions did not hold")

    monkeypatch.setattr(files, "_pipe_file", pipe_file)
    assert set_alias(url, "m", "stable", 1).change_number == 2
    assert others == [f"{root}/m/aliases/stable/1.json"]
