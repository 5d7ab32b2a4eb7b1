"""An upload becomes visible with its last file, and never replaces a version."""

from __future__ import annotations

import _thread
from collections.abc import Callable
from pathlib import Path

import pytest
import s3fs

from embedserve_store.checksums import verify
from embedserve_store.errors import StoreError
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.remote.remote_store import RemoteStore
from embedserve_store.remote.upload import upload_version

Publish = Callable[..., Path]


def test_the_manifest_comes_last(
    store: RemoteStore, new_version: Publish, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[int]]] = []
    upload, write = RemoteFolder.upload, RemoteFolder.write
    look = lambda name: seen.append((name.split("/")[-1], store.versions("m")))  # noqa: E731
    monkeypatch.setattr(
        RemoteFolder,
        "upload",
        lambda self, path, name, p: (upload(self, path, name, p), look(name)),
    )
    monkeypatch.setattr(
        RemoteFolder, "write", lambda self, name, data: (write(self, name, data), look(name))
    )
    upload_version(new_version(), url)
    assert seen == [
        ("plan.json", []),
        ("goldens.safetensors", []),
        ("tables.safetensors", []),
        ("manifest.json", [1]),
    ]


def test_a_number_that_is_taken_is_refused_and_its_version_stays(
    store: RemoteStore, uploaded: Path, new_version: Publish, url: str
) -> None:
    with pytest.raises(StoreError, match=f"{url}/m/1: exists already, and versions never change"):
        upload_version(new_version(9), url, 1)
    assert store.load("m").tables.rows("t")[1].view("<f4")[0] == 1


def test_another_number_is_written_into_the_manifest_which_stays_sealed(
    store: RemoteStore, uploaded: Path, url: str
) -> None:
    assert upload_version(uploaded, url, store.next_version("m")) == f"{url}/m/2"
    loaded = store.load("m", 2)
    verify(loaded)
    assert loaded.manifest.version == 2


def test_an_interrupted_upload_is_not_seen_and_the_next_number_is_free(
    store: RemoteStore, new_version: Publish, url: str
) -> None:
    def interrupt(file: str, bytes_done: int, bytes_total: int) -> None:
        if file == "tables.safetensors":
            _thread.interrupt_main()

    folder = new_version()
    with pytest.raises(KeyboardInterrupt):
        upload_version(folder, url, progress=interrupt)
    assert (store.versions("m"), store.next_version("m")) == ([], 2)
    upload_version(folder, url)
    assert store.versions("m") == [1]
    store.load("m")


def test_a_damaged_version_is_not_uploaded(
    new_version: Publish, url: str, objects: s3fs.S3FileSystem, root: str
) -> None:
    folder = new_version()
    with (folder / "tables.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    with pytest.raises(StoreError, match=r"tables\.safetensors: table 't': sha256"):
        upload_version(folder, url)
    assert objects.find(root) == []


def test_what_is_no_version_is_refused(tmp_path: Path, url: str) -> None:
    for folder, message in (
        (tmp_path / "latest", "its name is not a number"),
        (tmp_path / "m" / "1", "cannot be read"),
    ):
        with pytest.raises(StoreError, match=message):
            upload_version(folder, url)


def test_a_bucket_that_does_not_exist_is_not_made(
    new_version: Publish, objects: s3fs.S3FileSystem
) -> None:
    with pytest.raises(StoreError, match="s3://no-such-bucket-here/m/1"):
        upload_version(new_version(), "s3://no-such-bucket-here")
    assert "no-such-bucket-here" not in objects.ls("")


def test_progress_ends_at_the_size_of_each_file(new_version: Publish, url: str) -> None:
    folder = new_version()
    done: dict[str, tuple[int, int]] = {}
    upload_version(folder, url, progress=lambda file, *counts: done.update({file: counts}))
    assert done == {
        path.name: (path.stat().st_size,) * 2
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }
