"""Tests of full, read-only and shared caches: the server names the fault and loses nothing."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import s3fs
from forkserver import run_warm
from running_servers import ANSWER_S_MAX, Running, command, free_port, started, status
from stalling_proxy import StallingProxy, stalling_proxy
from store.remote.s3_server import environment, serve_s3
from volumes import Volume, can_freeze, can_mount, disk_volume, memory_volume

from embedserve_client import EmbedClient
from embedserve_store import TableSpec, publish

needs_mount = pytest.mark.skipif(not can_mount(), reason="only root may mount a volume")
needs_disk = pytest.mark.skipif(not can_freeze(), reason="only root may mount a file")

ROWS, DIM = 50_000, 16
"""Rows and dimension of a version's table, which has 3.2 MB."""
WAIT_S_MAX = 240
COMMAND_S_MAX = 120
TABLES_BYTES = ROWS * DIM * 4
TOO_SMALL = "size=2m,nr_inodes=1000"
ROOMY = "size=32m,nr_inodes=1000"
FEW_FILES = "size=32m,nr_inodes=4"


def publish_next(store: Path, number: int) -> None:
    """Publishes version ``number`` of "m", in which every value of row r is r + ``number``."""
    import torch

    weight = (torch.arange(ROWS)[:, None] + number).repeat(1, DIM).float()
    tables = [TableSpec("t", ROWS, DIM, ("t",), "sum", "float32")]
    published = publish({"ebc.embedding_bags.t.weight": weight}, store, model="m", tables=tables)
    assert published.version == number


@pytest.fixture
def store(tmp_path: Path) -> Path:
    publish_next(tmp_path / "store", 1)
    return tmp_path / "store"


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    with memory_volume(tmp_path / "cache", ROOMY) as volume:
        yield volume


@contextmanager
def started_server(
    store: str, cache: Path, log: Path, *options: object, mounts: str = ""
) -> Iterator[Running]:
    """Starts `embedserve serve STORE --cache CACHE …` without waiting; kills it at the end."""
    http_port, grpc_port = free_port(), free_port()
    ports = ("--http-port", http_port, "--grpc-port", grpc_port)
    words = command("serve", store, "--cache", cache, *ports, *options)
    with started(words, log, mounts=mounts) as process:
        try:
            yield Running(process, f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", log)
        finally:
            process.kill()


def wait_until(is_true: Callable[[], bool], server: Running) -> None:
    end = time.monotonic() + WAIT_S_MAX
    while not is_true():
        assert server.process.poll() is None, server.log.read_text()
        assert time.monotonic() < end, server.log.read_text()
        time.sleep(0.05)


def wait_until_logged(server: Running, *parts: str) -> None:
    """Waits until one line of the log contains all ``parts``."""

    def is_logged() -> bool:
        lines = server.log.read_text().splitlines()
        return any(all(part in line for part in parts) for line in lines)

    wait_until(is_logged, server)


def wait_until_serving(server: Running, number: int) -> None:
    """Waits until all looked-up rows are those of version ``number``."""
    wait_until(lambda: status(f"{server.http}/health/ready") == 200, server)
    with EmbedClient(server.http, timeout_s=ANSWER_S_MAX) as client:
        ids = [[0], [7], [ROWS - 1]]
        wait_until(lambda: client.embed({"t": ids}).version == number, server)
        values = client.embed({"t": ids}).values
    expected = np.repeat(np.array(ids, np.float32) + number, DIM, axis=1)
    np.testing.assert_array_equal(values, expected)


def cached_files(cache: Path) -> list[str]:
    """Returns the paths of all files in the cache except locks, relative to the store's folder."""
    found = (path.relative_to(cache) for path in cache.rglob("*") if path.is_file())
    return sorted("/".join(path.parts[1:]) for path in found if path.suffix != ".lock")


def has_only_versions(cache: Path, *numbers: int) -> bool:
    """Returns whether the cache has exactly these versions and no leftover of a pull."""
    names = ("goldens.safetensors", "manifest.json", "plan.json", "tables.safetensors")
    return cached_files(cache) == [f"m/{number}/{name}" for number in numbers for name in names]


@needs_mount
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TOO_SMALL, "the version needs "),
        (FEW_FILES, "No space left on device"),
        ("ro", "read-only file system"),
    ],
)
def test_start_without_cache_space_fails_with_one_line(
    store: Path, volume: Volume, options: str, message: str
) -> None:
    volume.remount(options)
    words = command("serve", store.as_uri(), "--cache", volume.folder, "--http-port", 0)
    done = run_warm(
        [*words, "--grpc-port", "0"],
        mounts=volume.mounts,
        timeout=COMMAND_S_MAX,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"embedserve: {volume.folder}")
    assert message in line
    volume.remount(f"rw,{ROOMY}")
    assert cached_files(volume.files) == []


@needs_mount
def test_waiting_server_logs_cache_faults_and_starts_once_there_is_space(
    store: Path, volume: Volume, tmp_path: Path
) -> None:
    volume.remount("ro")
    where = str(volume.folder)
    with started_server(
        store.as_uri(), volume.folder, tmp_path / "log", "--wait", mounts=volume.mounts
    ) as server:
        wait_until_logged(server, "waiting", where, "read-only file system")
        assert status(f"{server.http}/health/live") == 200
        assert status(f"{server.http}/health/ready") == 503
        volume.remount(f"rw,{TOO_SMALL}")
        wait_until_logged(server, "waiting", where, "the version needs")
        volume.remount(FEW_FILES)
        wait_until_logged(server, "waiting", where, "No space left on device")
        volume.remount(ROOMY)
        wait_until_serving(server, 1)
    assert has_only_versions(volume.files, 1)


@needs_mount
def test_version_without_cache_space_is_not_served_until_there_is_space(
    store: Path, volume: Volume, tmp_path: Path
) -> None:
    options = ("--follow", "latest", "--follow-s", 0.2)
    with started_server(
        store.as_uri(), volume.folder, tmp_path / "log", *options, mounts=volume.mounts
    ) as server:
        wait_until_serving(server, 1)
        volume.remount("size=5m")
        publish_next(store, 2)
        wait_until_logged(server, str(volume.folder), "the version needs")
        wait_until_serving(server, 1)
        volume.remount("ro")
        wait_until_logged(server, str(volume.folder), "read-only file system")
        wait_until_serving(server, 1)
        volume.remount(f"rw,{ROOMY}")
        wait_until_serving(server, 2)
    assert has_only_versions(volume.files, 1, 2)
    volume.remount("ro")
    # Cached versions are served even if the cache is read-only.
    with started_server(
        store.as_uri(), volume.folder, tmp_path / "again", mounts=volume.mounts
    ) as server:
        wait_until_serving(server, 2)


def is_writing(server: Running) -> bool:
    """Returns whether a thread of the server waits for a frozen disk."""
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            if "percpu" in (task / "wchan").read_text():
                return True
    return False


@needs_disk
def test_hanging_cache_disk_delays_no_health_check_and_no_lookup(
    store: Path, tmp_path: Path
) -> None:
    options = ("--follow", "latest", "--follow-s", 0.2)
    with (
        disk_volume(tmp_path / "cache") as volume,
        started_server(
            store.as_uri(), volume.folder, tmp_path / "log", *options, mounts=volume.mounts
        ) as server,
    ):
        with volume.stopped():
            wait_until(lambda: is_writing(server), server)
            wait_until(lambda: status(f"{server.http}/health/live") == 200, server)
            assert status(f"{server.http}/health/ready") == 503
        wait_until_serving(server, 1)
        with volume.stopped():
            publish_next(store, 2)
            wait_until(lambda: is_writing(server), server)
            assert status(f"{server.http}/health/live") == 200
            wait_until_serving(server, 1)
        wait_until_serving(server, 2)
        assert has_only_versions(volume.files, 1, 2)


@pytest.fixture
def stalling_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Path
) -> Iterator[StallingProxy]:
    """Serves s3://bucket/store through a proxy that stalls after half of the rows.

    Setting its ``released`` delivers the rest.
    """
    (tmp_path / "s3" / "bucket").mkdir(parents=True)
    store.rename(tmp_path / "s3" / "bucket" / "store")
    s3fs.S3FileSystem.clear_instance_cache()
    with serve_s3(tmp_path / "s3", "--etag-hash", "") as endpoint:
        server_port = int(endpoint.rpartition(":")[2])
        with stalling_proxy(server_port, TABLES_BYTES // 2) as proxy:
            for name, value in environment(f"http://127.0.0.1:{proxy.port}").items():
                monkeypatch.setenv(name, value)
            yield proxy


def test_cache_of_a_server_killed_while_pulling_is_taken_over(
    stalling_store: StallingProxy, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with started_server("s3://bucket/store", cache, tmp_path / "first") as first:
        wait_until(stalling_store.stalled.is_set, first)
        wait_until(lambda: status(f"{first.http}/health/live") == 200, first)
        assert status(f"{first.http}/health/ready") == 503
    leftovers = cached_files(cache)
    assert leftovers
    assert all(name.startswith("m/.") for name in leftovers)
    stalling_store.released.set()
    with started_server("s3://bucket/store", cache, tmp_path / "second") as second:
        wait_until_serving(second, 1)
    assert has_only_versions(cache, 1)


def test_two_servers_with_one_cache_pull_a_version_once(
    stalling_store: StallingProxy, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with started_server("s3://bucket/store", cache, tmp_path / "first") as first:
        wait_until(stalling_store.stalled.is_set, first)
        with started_server("s3://bucket/store", cache, tmp_path / "second") as second:
            wait_until_logged(second, "another process is copying it, waiting")
            stalling_store.released.set()
            wait_until_serving(first, 1)
            wait_until_serving(second, 1)
    assert has_only_versions(cache, 1)
    assert stalling_store.nbytes < 2 * TABLES_BYTES
