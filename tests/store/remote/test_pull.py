"""Tests of a pull: the cache has a whole, verified version or none, also after a kill or concurrent
pulls."""

import errno
import fcntl
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest
import s3fs
from code_forker import CodeForker
from server.python import environment
from store.remote.conftest import pulled_files as files

from embedserve_store.errors import StoreError, UnreachableError
from embedserve_store.model_store import ModelStore
from embedserve_store.remote import remote_files
from embedserve_store.remote.remote_store import RemoteStore
from embedserve_store.transfer import receive

PULL = """
import logging, os, sys
from pathlib import Path
from embedserve_store.remote import remote_files
from embedserve_store.remote.remote_store import RemoteStore

logging.basicConfig(level=logging.INFO, format="%(message)s")
remote_files.PART_BYTES = 10_000
url, cache, at_first_part = sys.argv[1:]
calls = []

def progress(file, bytes_done, bytes_total):
    calls.append(file)
    if file == "tables.safetensors" and calls.count(file) == 1:
        if at_first_part == "die":
            os.kill(os.getpid(), 9)

loaded = RemoteStore(url, Path(cache), progress).load("m")
print(loaded.path, calls.count("tables.safetensors"), flush=True)
"""


def start_pull(url: str, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PULL, url, str(cache), "live"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_pull_leaves_nothing_visible_and_continues(
    url: str, uploaded: Path, tmp_path: Path, forking: CodeForker
) -> None:
    cache = tmp_path / "cache"
    assert forking.run(PULL, url, cache, "die") == -signal.SIGKILL
    assert "tables.safetensors" in files(cache)
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    assert ModelStore(folder).models() == []
    loaded = RemoteStore(url, cache).load("m")
    assert files(cache) == files(loaded.path) == files(uploaded)


def test_two_concurrent_processes_pull_once(
    url: str, uploaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process begins once the first part has arrived."""
    monkeypatch.setattr(remote_files, "PART_BYTES", 10_000)
    cache, calls = tmp_path / "cache", list[str]()
    with ExitStack() as processes:
        others: list[subprocess.Popen[str]] = []

        def progress(file: str, bytes_done: int, bytes_total: int) -> None:
            calls.append(file)
            if file == "tables.safetensors" and not others:
                others.append(processes.enter_context(start_pull(url, cache)))
                assert others[0].stderr
                assert any("another process is copying it" in line for line in others[0].stderr)

        loaded = RemoteStore(url, cache, progress).load("m")
        (other,) = others
        out, errors = other.communicate(timeout=300)
    assert other.returncode == 0, errors
    assert calls.count("tables.safetensors") > 1
    assert out.split() == [str(loaded.path), "0"]
    assert files(cache) == files(uploaded)


def test_interrupted_pull_continues(
    url: str,
    uploaded: Path,
    tmp_path: Path,
    read_bytes: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_files, "PART_BYTES", 10_000)
    monkeypatch.setattr(receive, "BUFFER_BYTES", 10_000)

    def stop(file: str, bytes_done: int, bytes_total: int) -> None:
        if file == "tables.safetensors" and bytes_done >= bytes_total // 2:
            raise KeyboardInterrupt

    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        RemoteStore(url, cache, stop).load("m")
    read_bytes.clear()
    loaded = RemoteStore(url, cache).load("m")
    nbytes = (uploaded / "tables.safetensors").stat().st_size
    assert 0 < read_bytes["tables.safetensors"] <= nbytes // 2
    assert files(cache) == files(loaded.path) == files(uploaded)


def test_partial_pull_is_discarded_without_file_locks(
    url: str, uploaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(file: str, bytes_done: int, bytes_total: int) -> None:
        if file == "tables.safetensors":
            raise UnreachableError("the store is gone")

    cache = tmp_path / "cache"
    with pytest.raises(UnreachableError):
        RemoteStore(url, cache, lose).load("m")
    assert "tables.safetensors" in files(cache)
    shutil.rmtree(cache)
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    with pytest.raises(UnreachableError):
        RemoteStore(url, cache, lose).load("m")
    assert files(cache) == []


Damage = Callable[[bytes], bytes]


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("tables.safetensors", lambda data: data[:-1] + b"x", "table 't': sha256 is "),
        ("tables.safetensors", lambda data: data[:-1], "bytes, expected "),
        ("tables.safetensors", lambda data: data[:4000] + b"\t" + data[4001:], "header is not"),
        ("ids.safetensors", lambda data: data[:-1] + b"x", ""),
        ("goldens.safetensors", lambda data: data[:-1] + b"x", "sha256 is "),
        ("plan.json", lambda data: data + b" ", "sha256 is "),
        ("manifest.json", lambda data: data.replace(b'"t"', b'"u"'), "sha256 is "),
        ("manifest.json", lambda data: data[:100], "not JSON, or half-written"),
    ],
)
def test_damaged_object_is_rejected_and_discarded(
    store: RemoteStore,
    new_version: Callable[..., Path],
    objects: s3fs.S3FileSystem,
    root: str,
    url: str,
    tmp_path: Path,
    name: str,
    damage: Damage,
    message: str,
) -> None:
    from embedserve_store.remote.upload import upload_version

    upload_version(new_version(vocabularies={"t": range(2000)}), url)
    path = f"{root}/m/1/{name}"
    objects.pipe_file(path, damage(objects.cat_file(path)))
    with pytest.raises(StoreError, match=f"{name}: .*{message}") as caught:
        store.load("m")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists() or files(tmp_path / "cache") == []


@pytest.mark.parametrize("name", ["plan.json", "tables.safetensors"])
def test_missing_object_is_named(
    store: RemoteStore, uploaded: Path, objects: s3fs.S3FileSystem, root: str, name: str
) -> None:
    objects.rm(f"{root}/m/1/{name}")
    with pytest.raises(StoreError, match=f"a/m/1/{name}: does not exist"):
        store.load("m")


def test_insufficient_disk_space_is_rejected_before_pulling(
    url: str, uploaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(path.stat().st_size for path in uploaded.iterdir())
    free = shutil.disk_usage(tmp_path)._replace(free=needed - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    calls: list[str] = []
    message = f"needs {needed:,} bytes, the disk has {needed - 1:,} free"
    with pytest.raises(StoreError, match=message):
        RemoteStore(url, tmp_path / "cache", lambda file, *_: calls.append(file)).load("m")
    assert (calls, files(tmp_path / "cache")) == ([], [])


def test_cache_path_that_is_a_file_is_rejected(url: str, uploaded: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be written: .*/file is not a folder"):
        RemoteStore(url, tmp_path / "file").load("m")


def test_manifest_of_format_version_1_is_pulled(
    store: RemoteStore, uploaded: Path, objects: s3fs.S3FileSystem, root: str
) -> None:
    path = f"{root}/m/1/manifest.json"
    data = objects.cat_file(path).replace(b'"format_version": 2', b'"format_version": 1')
    objects.pipe_file(path, b"".join(data.rpartition(b',\n  "sha256"')[:1]) + b"\n}\n")
    assert store.load("m").path.name == "1"


def test_pulled_version_has_only_its_own_files(
    store: RemoteStore, uploaded: Path, objects: s3fs.S3FileSystem, root: str
) -> None:
    objects.pipe_file(f"{root}/m/1/left-over.bin", b"x")
    assert files(store.load("m").path) == files(uploaded)
