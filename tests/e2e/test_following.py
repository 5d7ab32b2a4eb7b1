"""Tests of rollouts on a real server under load: no response mixes two versions."""

import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3fs
import torch
from running_servers import ANSWER_S_MAX, Running, running
from store.remote.s3_server import environment, serve_s3
from waits import wait_until

from embedserve_client import EmbedClient, EmbedResult, GrpcEmbedClient
from embedserve_store import StoreError, TableSpec, prune, publish, remove_version, set_alias

ROWS, DIM, STEP = 100, 8, 1000
WAIT_S_MAX = 120
PAUSE_S = 0.01
FOLLOW_S = 0.1
FOLLOW = ("--follow-s", FOLLOW_S)
POLLS_MIN = 10


def publish_next(store: Path | str, number: int, model: str = "m") -> None:
    """Publishes version ``number`` of ``model``, in which every value of row r is
    number * STEP + r."""
    values = number * STEP + torch.arange(ROWS, dtype=torch.float32)
    tables = [
        TableSpec("user", ROWS, DIM, ("user",), "sum", "float32"),
        TableSpec("item", ROWS, 2 * DIM, ("item",), "mean", "float32"),
    ]
    weights = {
        f"ebc.embedding_bags.{table.name}.weight": values[:, None].repeat(1, table.embedding_dim)
        for table in tables
    }
    published = publish(weights, store, model=model, tables=tables, sharding="table_wise")
    assert published.version == number


class Load:
    """Clients of both protocols that send one request after another.

    Each response is compared with the rows of the version that it names. The clients pause between
    requests, so that a loading version gets the cores.
    """

    def __init__(self, server: Running) -> None:
        self.answers: Counter[int] = Counter()
        self.wrong: list[str] = []
        self._server = server
        self._stop = threading.Event()
        clients: list[Callable[[], None]] = [self._rest, self._grpc, self._stream]
        self._threads = [threading.Thread(target=client) for client in clients]

    def _rest(self) -> None:
        with EmbedClient(self._server.http, timeout_s=ANSWER_S_MAX) as client:
            self._send_requests(client.embed)

    def _grpc(self) -> None:
        with GrpcEmbedClient(self._server.grpc, timeout_s=ANSWER_S_MAX) as client:
            self._send_requests(client.embed)

    def _stream(self) -> None:
        with GrpcEmbedClient(self._server.grpc) as client:
            for answer in client.embed_stream(self._requests()):
                self._record(answer.result())

    def _requests(self) -> Iterator[dict[str, list[list[int]]]]:
        while not self._stop.is_set():
            yield {"user": [[7]], "item": [[7, 7]]}
            self._stop.wait(PAUSE_S)

    def _send_requests(self, embed: Callable[..., EmbedResult]) -> None:
        while not self._stop.is_set():
            try:
                self._record(embed({"user": [[7]], "item": [[7, 7]]}))
            except Exception as error:
                self.wrong.append(repr(error))
            self._stop.wait(PAUSE_S)

    def _record(self, result: EmbedResult) -> None:
        expected = np.full((1, 3 * DIM), result.version * STEP + 7, np.float32)
        if not np.array_equal(result.values, expected):
            self.wrong.append(f"version {result.version} answered {result.values}")
        self.answers[result.version] += 1

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=WAIT_S_MAX)

    def wait_for_version(self, number: int) -> None:
        """Waits until fifty consecutive responses are of version ``number``."""
        end = time.monotonic() + WAIT_S_MAX
        while True:
            before = self.answers.copy()
            while (self.answers.copy() - before).total() < 50:
                assert time.monotonic() < end, (self.answers, self._server.log.read_text())
                time.sleep(0.01)
            if set(self.answers.copy() - before) == {number}:
                return


@pytest.mark.parametrize("workers", [1, 2])
def test_new_versions_are_rolled_out_under_load(tmp_path: Path, workers: int) -> None:
    store = tmp_path / "store"
    publish_next(store, 1)
    options = ("--follow", "latest", *FOLLOW, "--workers", workers)
    with running(store, tmp_path / "log", *options) as server:
        with Load(server) as load:
            load.wait_for_version(1)
            for number in (2, 3, 4):
                publish_next(store, number)
                load.wait_for_version(number)
        assert load.wrong == []
        assert set(load.answers) == {1, 2, 3, 4}
        # All clients may be connected to the same worker.
        wait_until(lambda: all(is_settled(server.model(), 4) for _ in range(20)))
        metrics = server.metrics()
        for gauge in ("version", "wanted_version"):
            assert f'embedserve_model_{gauge}{{alias="",model="m"}} 4.0' in metrics
        assert 'embedserve_model_switches_total{alias="",model="m"} 3.0' in metrics
        wait_until(lambda: server.log.read_text().count(": switched to version") == 3)
        assert "Traceback" not in server.log.read_text()
        wait_until(lambda: not mapped_versions(server, store, workers) - {4})
        assert prune(store, "m", 1) == [1, 2, 3]  # no process maps them any more


def test_served_version_is_not_removed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    publish_next(store, 1)
    with running(store, tmp_path / "log", "--model", "m@1", "--workers", 2) as server:
        for number in (2, 3):
            publish_next(store, number)
        with pytest.raises(StoreError, match="m/1: is in use"):
            remove_version(store, "m", 1)
        assert prune(store, "m", 1) == [2]
        with EmbedClient(server.http) as client:
            assert client.embed({"user": [[7]], "item": [[7, 7]]}).version == 1
    assert prune(store, "m", 1) == [1]


def test_version_with_wrong_results_is_served_by_no_worker(tmp_path: Path) -> None:
    store = tmp_path / "store"
    publish_next(store, 1)
    options = ("--follow", "latest", *FOLLOW, "--workers", 2)
    with running(store, tmp_path / "log", *options) as server, Load(server) as load:
        make_version_with_wrong_rows(store, tmp_path / "elsewhere")
        wait_until(lambda: "m: version 2 stays out" in server.log.read_text())
        wait_until(lambda: has_failed(server.model()))
        publish_next(store, 3)
        load.wait_for_version(3)
    assert load.wrong == []
    assert set(load.answers) == {1, 3}
    assert server.log.read_text().count("stays out") == 1


def test_all_workers_report_an_unreadable_version_until_it_is_repaired(
    tmp_path: Path,
) -> None:
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    publish_next(store, 1)
    for number in (1, 2):
        publish_next(elsewhere, number)
    intact = elsewhere / "m" / "2"
    size = truncate_tables(Path(shutil.copytree(intact, elsewhere / "cut")))
    options = ("--follow", "latest", *FOLLOW, "--workers", 2)
    with running(store, tmp_path / "log", *options) as server, Load(server) as load:
        (elsewhere / "cut").rename(store / "m" / "2")
        wait_until(lambda: "stays out" in server.log.read_text())
        wait_until(lambda: all(is_unopened(server) for _ in range(20)))
        assert metric(server, "wanted_version") == 2
        time.sleep(POLLS_MIN * FOLLOW_S)  # the server retries, and logs nothing
        assert is_unopened(server)
        tables = store / "m" / "2" / "tables.safetensors"
        assert tables.stat().st_size == size
        shutil.copy(intact / "tables.safetensors", elsewhere / "tables")
        (elsewhere / "tables").rename(tables)
        load.wait_for_version(2)
        wait_until(lambda: all(not is_unopened(server) for _ in range(20)))
        # A worker that loads the repaired version reports no error, but sets the gauge until then.
        wait_until(lambda: all(metric(server, "refused") == 0 for _ in range(20)))
    assert load.wrong == []
    log = server.log.read_text()
    assert log.count("stays out") == 1
    assert "Traceback" not in log


def truncate_tables(version: Path) -> int:
    """Removes the last bytes of a version's tables, and returns the remaining size."""
    tables = version / "tables.safetensors"
    tables.chmod(0o644)
    size = tables.stat().st_size - 16
    os.truncate(tables, size)
    return size


def is_unopened(server: Running) -> bool:
    """Returns whether the worker that accepts this connection reports why version 2 is not served.

    The metrics are those of all workers.
    """
    pending = server.model().get("next")
    if pending is None or pending["state"] != "failed":  # the repaired version is loading
        return False
    assert pending["version"] == 2
    assert "tables.safetensors" in pending["reason"]
    return metric(server, "refused") == 1


def metric(server: Running, name: str) -> float:
    """Returns the gauge embedserve_model_``name``."""
    text = server.metrics()
    (line,) = [one for one in text.splitlines() if one.startswith(f"embedserve_model_{name}{{")]
    return float(line.rpartition(" ")[2])


def make_version_with_wrong_rows(store: Path, elsewhere: Path) -> None:
    """Makes a version 2 with the rows of version 3: of the right size, but with other goldens."""
    for number in (1, 2, 3):
        publish_next(elsewhere, number)
    tables = elsewhere / "m" / "2" / "tables.safetensors"
    tables.chmod(0o644)
    shutil.copy(elsewhere / "m" / "3" / "tables.safetensors", tables)
    (elsewhere / "m" / "2").rename(store / "m" / "2")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yields the URL of an S3 bucket that this process and its children may write to."""
    (tmp_path / "s3" / "bucket").mkdir(parents=True)
    with serve_s3(tmp_path / "s3") as endpoint:
        for name, value in environment(endpoint).items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield "s3://bucket/store"
    s3fs.S3FileSystem.clear_instance_cache()


def test_alias_on_s3_is_followed_forwards_and_back(bucket: str, tmp_path: Path) -> None:
    publish_next(bucket, 1)
    set_alias(bucket, "m", "stable", 1)
    options = ("--model", "m@stable", "--follow", "alias", *FOLLOW, "--cache", tmp_path / "cache")
    with running(bucket, tmp_path / "log", *options) as server:
        with Load(server) as load:
            publish_next(bucket, 2)
            set_alias(bucket, "m", "stable", 2, why="trained again")
            load.wait_for_version(2)
            set_alias(bucket, "m", "stable", 1, why="rolled back")
            load.wait_for_version(1)
        assert load.wrong == []
        assert set(load.answers) == {1, 2}
        assert "Traceback" not in server.log.read_text()


def is_settled(model: dict[str, Any], number: int) -> bool:
    """Returns whether a worker serves version ``number`` and loads no other."""
    return model["version"] == number and "next" not in model


def has_failed(model: dict[str, Any]) -> bool:
    """Returns whether a worker reports that version 2 has failed."""
    if model.get("next", {}).get("state") != "failed":
        return False
    assert (model["version"], model["next"]["version"]) == (1, 2)
    assert "are not the published ones" in model["next"]["reason"]
    return True


def mapped_versions(server: Running, store: Path, workers: int) -> set[int]:
    """Returns the versions that the serving processes have mapped."""
    pid = server.process.pid
    serving = server.children() if workers > 1 else [pid]
    maps = [Path(f"/proc/{one}/maps").read_text() for one in serving]
    return {
        number
        for number in (1, 2, 3, 4)
        if any(f"{store}/m/{number}/tables.safetensors" in text for text in maps)
    }
