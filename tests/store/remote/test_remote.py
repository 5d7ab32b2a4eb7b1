"""Tests of models under a URL: they are listed and loaded like those in a folder, through the
cache."""

import logging
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import s3fs
from store.remote.conftest import Publish, use_endpoint

from embedserve_store.errors import StoreError, UnreachableError
from embedserve_store.model_store import ModelStore
from embedserve_store.remote.remote_store import RemoteStore, default_cache
from embedserve_store.remote.upload import upload_version
from embedserve_store.verification import verify


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize("scheme", ["s3", "file", "memory"])
def test_pulled_version_equals_uploaded_version_byte_for_byte(
    scheme: str, url: str, new_version: Publish, tmp_path: Path
) -> None:
    where = {"s3": url, "file": f"file://{tmp_path}/far/away", "memory": f"memory:/{tmp_path}"}
    folder = new_version(vocabularies={"t": range(7, 2007)})
    assert upload_version(folder, where[scheme]) == f"{where[scheme]}/m/1"
    store = ModelStore(where[scheme], tmp_path / "cache")
    assert (store.models(), store.versions("m")) == (["m"], [1])
    loaded = store.load("m")
    verify(loaded)
    assert loaded.path.is_relative_to(tmp_path / "cache")
    assert names(loaded.path) == names(folder)
    for name in names(folder):
        assert (loaded.path / name).read_bytes() == (folder / name).read_bytes()


def test_pulled_version_is_read_only_and_can_be_removed(
    store: RemoteStore, new_version: Publish, url: str
) -> None:
    upload_version(new_version(vocabularies={"t": range(2000)}), url)
    pulled = store.load("m").path
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in pulled.iterdir()}
    assert len(modes) == 5
    assert [name for name, mode in modes.items() if mode & 0o222] == []
    shutil.rmtree(pulled)
    assert store.load("m").path == pulled


def test_folder_store_is_opened_in_place(uploaded: Path) -> None:
    store = ModelStore(uploaded.parent.parent)
    assert not store.is_remote
    assert store.load("m").path == uploaded


def test_second_load_and_second_store_use_the_cache(
    url: str, uploaded: Path, tmp_path: Path
) -> None:
    calls: list[str] = []
    for _ in range(3):
        store = ModelStore(url + "/", str(tmp_path / "cache"), lambda file, *_: calls.append(file))
        store.load("m")
        calls.append("loaded")
    assert calls[-3:] == ["loaded"] * 3
    assert calls.count("tables.safetensors") == 1


def test_highest_version_is_loaded_by_default(
    store: RemoteStore, new_version: Publish, url: str
) -> None:
    for value in (1, 2):
        upload_version(new_version(value), url)
    upload_version(new_version(3), url, 10)
    assert store.versions("m") == [1, 2, 10]
    assert store.load("m").manifest.version == 10
    assert store.load("m", 2).manifest.version == 2
    assert store.next_version("m") == 11


def test_version_without_manifest_does_not_exist(
    store: RemoteStore, uploaded: Path, objects: s3fs.S3FileSystem, root: str
) -> None:
    objects.rm(f"{root}/m/1/manifest.json")
    for name in ("m/manifest.json", "m/README", "m/x/manifest.json", "notes/1"):
        objects.pipe_file(f"{root}/{name}", b"{}")
    assert (store.models(), store.versions("m"), store.next_version("m")) == ([], [], 2)
    with pytest.raises(StoreError, match=r"stores/a/m: no version is published$"):
        store.load("m")


def test_missing_model_or_version_is_named(store: RemoteStore, uploaded: Path) -> None:
    with pytest.raises(StoreError, match=r"a/m: version 2 does not exist; versions are 1"):
        store.load("m", 2)
    with pytest.raises(StoreError, match=r"a: there is no model 'other'; models are m$"):
        store.load("other")
    with pytest.raises(StoreError, match=r"'\.\./m' is not the name of a model"):
        store.load("../m")
    assert store.versions("other") == []


def test_missing_bucket_or_folder_is_named(url: str, tmp_path: Path) -> None:
    for missing in (url, "s3://no-such-bucket-here/store"):
        with pytest.raises(StoreError, match=f"{missing}: does not exist$"):
            RemoteStore(missing, tmp_path).models()
    assert os.listdir(tmp_path) == []


def test_version_republished_under_its_number_is_rejected(
    store: RemoteStore,
    uploaded: Path,
    objects: s3fs.S3FileSystem,
    root: str,
    new_version: Publish,
    url: str,
) -> None:
    cached = store.load("m").path
    objects.rm(f"{root}/m/1", recursive=True)
    upload_version(new_version(5), url, 1)
    with pytest.raises(StoreError, match=f"not the version that was pulled to {cached}: versions"):
        store.load("m")
    shutil.rmtree(cached)
    assert store.load("m").tables.rows("t")[1].view("<f4")[0] == 5


def invalidate_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    s3fs.S3FileSystem.clear_instance_cache()


def break_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    use_endpoint(monkeypatch, "http://127.0.0.1:1")


@pytest.mark.parametrize("cut", [invalidate_credentials, break_connection])
def test_unreachable_store_serves_only_numbered_versions_from_the_cache(
    url: str,
    uploaded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cut: Callable[[pytest.MonkeyPatch], None],
) -> None:
    cached = RemoteStore(url, tmp_path / "cache").load("m").path
    cut(monkeypatch)
    store = RemoteStore(url, tmp_path / "cache")
    with caplog.at_level(logging.WARNING, "embedserve_store"):
        assert store.load("m", 1).path == cached
    assert "loading version 1 of 'm' from the cache" in caplog.text
    for version in (None, 2):
        with pytest.raises(UnreachableError, match=f"{url}/m: the remote store says: ") as caught:
            store.load("m", version)
        assert "\n" not in str(caught.value)


def test_missing_credentials_are_reported_in_one_line(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(UnreachableError, match=f"^{url}: .*[Uu]nable to locate credentials"):
        RemoteStore(url, tmp_path).models()


@pytest.mark.parametrize(
    ("url", "missing", "message"),
    [
        ("gs://bucket/store", ["gcsfs"], "not installed: .*gs:// needs gcsfs"),
        ("s3://bucket/store", ["fsspec", "fsspec.core"], r"pip install 'embedserve\[remote\]'"),
        ("nothing://bucket/store", [], "not a store: Protocol not known: nothing"),
        ("http://host/store", [], "HTTP cannot list or write files: use s3://, gs:// or file://"),
    ],
)
def test_missing_package_is_named(
    url: str, missing: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in missing:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StoreError, match=f"^{url}: .*{message}"):
        ModelStore(url, tmp_path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "names no bucket or folder"),
        ("file:///", "names no bucket or folder"),
        ("FILE://", "names no bucket or folder"),
        ("file://localhost/store", "names a relative folder, expected file:///PATH"),
    ],
)
def test_url_that_would_be_a_folder_beside_the_caller_is_rejected(
    url: str, message: str, tmp_path: Path
) -> None:
    """Guards against fsspec, for which s3: and localhost/store are relative paths."""
    with pytest.raises(StoreError, match=f"^{url}: {message}"):
        ModelStore(url, tmp_path)


def test_each_url_has_its_own_cache_folder(new_version: Publish, url: str, tmp_path: Path) -> None:
    folder = new_version()
    paths = set()
    for one in (url, f"{url}-b", f"{url}/b"):
        upload_version(folder, one)
        paths.add(ModelStore(one, tmp_path / "cache").load("m").path)
    assert len(paths) == 3


def test_default_cache_is_in_the_users_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "embedserve"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache" / "embedserve"


def test_default_cache_of_a_user_without_a_name_is_in_the_root_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31)
    assert default_cache() == Path("/.cache/embedserve")
