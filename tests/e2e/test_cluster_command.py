"""Tests of `embedserve cluster`: one command starts shards and a router on one host."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from e2e.parts_cluster import SLOW_CALL_OPTIONS
from running_servers import (
    READY_S_MAX,
    STOPPED_S_MAX,
    command,
    free_port,
    is_running,
    run_warm_command,
    started,
)
from waits import wait_until

from embedserve_store import TableSpec, publish

ROWS, DIM = 100, 8
PAUSE_S = 0.01
JOINED = re.compile(r"part 1 of 2: \S+ joined for m@1")


def publish_rows(store: Path, model: str, hosts: int) -> None:
    """Publishes a model in which every value of row r is r."""
    values = torch.arange(ROWS, dtype=torch.float32)[:, None].repeat(1, DIM)
    spec = [TableSpec("user", ROWS, DIM, ("user",), "sum", "float32")]
    weights = {"embedding_bags.user.weight": values}
    publish(weights, store, model=model, tables=spec, sharding="row_wise", hosts=hosts)


@contextmanager
def cluster(
    store: Path, log: Path, *arguments: object
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Yields the process of a cluster that is ready, and the address of its router."""
    url = f"http://127.0.0.1:{free_port()}"
    ports = ("--http-port", url.rpartition(":")[2], "--grpc-port", free_port(), *SLOW_CALL_OPTIONS)
    words = command("cluster", store, *ports, *arguments)
    with started(words, log, has_warm_children=True) as process:

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            return f"curl -s {url}/models/" in log.read_text()

        wait_until(is_ready, log.read_text)
        yield process, url


def test_killed_shard_restarts_and_no_request_fails(tmp_path: Path) -> None:
    store, log = tmp_path / "store", tmp_path / "log"
    publish_rows(store, "m", hosts=2)
    with cluster(store, log, "--replicas", 2) as (process, url), httpx.Client(timeout=60) as client:

        def check_request() -> None:
            response = client.post(f"{url}/embed", json={"features": {"user": [[3, 97]]}})
            assert response.status_code == 200, response.text
            assert response.json()["values"] == [[100.0] * DIM]

        check_request()
        started = dict(
            re.findall(r"^(part \d replica \d) starts as process (\d+)", log.read_text(), re.M)
        )
        assert len(started) == 4
        joined = len(JOINED.findall(log.read_text()))
        os.kill(int(started["part 1 replica 0"]), signal.SIGKILL)
        end = time.monotonic() + READY_S_MAX
        while len(JOINED.findall(log.read_text())) == joined:
            check_request()
            assert time.monotonic() < end, log.read_text()
            time.sleep(PAUSE_S)
        os.kill(int(started["part 1 replica 1"]), signal.SIGKILL)  # the other replica responds
        for _ in range(50):
            check_request()
        process.terminate()
        assert process.wait(STOPPED_S_MAX) == 0
    pids = re.findall(r"starts as process (\d+)", log.read_text())
    assert not any(is_running(int(pid)) for pid in pids)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health/live")


def test_stores_without_matching_parts_are_rejected(tmp_path: Path) -> None:
    publish_rows(tmp_path, "whole", hosts=1)
    publish_rows(tmp_path, "two", hosts=2)
    publish_rows(tmp_path, "three", hosts=3)
    for models, words in (
        (["whole"], "whole/1: was published without --hosts, so it has no parts: publish it with"),
        (["two", "three"], "numbers of parts differ: two 2, three 3"),
        (["two@1@2"], "expected NAME, NAME@VERSION or NAME@ALIAS"),
    ):
        named = [word for model in models for word in ("--model", model)]
        done = run_warm_command("cluster", tmp_path, *named)
        assert done.returncode == 1
        assert words in done.stderr
