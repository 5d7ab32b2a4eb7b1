"""Tests of a server that follows deltas and switches versions while requests and deltas arrive."""

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from e2e.delta_servers import (
    BAGS,
    COUNTS,
    DIM,
    WAIT_S_MAX,
    Callers,
    publish_values,
    push,
    ranks,
    store,
    wait_until,
)
from running_servers import ANSWER_S_MAX, Running, running

from embedserve_client import EmbedClient
from embedserve_store import DeltaWriter, compact_deltas, undo_deltas

__all__ = ["ranks", "store"]
FOLLOW = ("--deltas", "follow", "--workers", "2", "--follow", "latest", "--follow-s", "0.1")
PUSH_S = 0.05
MEMORY = re.compile(r" (\d+) +/memfd:embedserve-deltas")


class Trainer:
    """A training job that pushes a delta every 50 ms inside its context."""

    def __init__(self, store: Path) -> None:
        self._writer = DeltaWriter(store, model="m")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._train)
        self.seq = 0

    def _train(self) -> None:
        while not self._stop.wait(PUSH_S):
            push(self._writer, self.seq + 1)
            self.seq += 1

    def __enter__(self) -> "Trainer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S_MAX)
        self._writer.close()


@contextmanager
def running_callers(server: Running) -> Iterator[Callers]:
    callers = Callers(server)
    try:
        yield callers
    finally:
        callers.end()


def mapped_memories(server: Running) -> list[set[str]]:
    """Returns, for each process, the inodes of the versions' memory that it has mapped."""
    pids = [server.process.pid, *server.children()]
    return [set(MEMORY.findall(Path(f"/proc/{pid}/maps").read_text())) for pid in pids]


def has_one_memory(server: Running) -> bool:
    """Returns whether all processes have mapped the same memory, and no other.

    They switch one after another.
    """
    first, *other_processes = mapped_memories(server)
    return len(first) == 1 and all(one == first for one in other_processes)


def compact_and_switch(store: Path, server: Running, trainer: Trainer, callers: Callers) -> int:
    """Publishes a compacted version, and returns its number once the server has later rows."""
    compacted = compact_deltas(store, "m").version
    wait_until(lambda: server.model()["version"] == compacted)
    later = trainer.seq + 3
    wait_until(lambda: callers.last_seq >= later)
    return compacted


@pytest.mark.parametrize("ranks", [2])
def test_results_stay_correct_while_the_server_switches_compacted_versions(
    store: Path, tmp_path: Path
) -> None:
    with (
        Trainer(store) as trainer,
        running(store, tmp_path / "log", *FOLLOW) as server,
        running_callers(server) as callers,
    ):
        wait_until(lambda: callers.last_seq > 3)
        before = mapped_memories(server)
        assert len(set.union(*before)) == 1
        for number in (2, 3):
            assert compact_and_switch(store, server, trainer, callers) == number
            wait_until(lambda: has_one_memory(server))
            (memory,) = set.union(*mapped_memories(server))
            assert {memory} not in before
            before += mapped_memories(server)
        assert server.model()["deltas"]["line"] == 1
        callers.end()
        assert (callers.wrong, callers.failures) == ([], [])
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("killed", ["applier", "worker"])
def test_version_switch_survives_a_killed_process(store: Path, tmp_path: Path, killed: str) -> None:
    with (
        Trainer(store) as trainer,
        running(store, tmp_path / "log", *FOLLOW) as server,
        running_callers(server) as callers,
    ):
        wait_until(lambda: callers.last_seq > 3)
        compact_deltas(store, "m")
        wait_until(lambda: {"next"} & {*server.model()} or server.model()["version"] == 2)
        processes = server.children()
        pid = processes[0 if killed == "applier" else 1]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(server.children()) == 3 and pid not in server.children())
        wait_until(lambda: server.model()["version"] == 2)
        assert compact_and_switch(store, server, trainer, callers) == 3
        wait_until(lambda: "is ready again" in server.log.read_text() or killed == "applier")
        wait_until(lambda: has_one_memory(server))
        callers.end()
        assert callers.wrong == []
        assert killed == "worker" or callers.failures == []


def test_stalled_server_switches_past_the_damaged_delta(store: Path, tmp_path: Path) -> None:
    intact_store = tmp_path / "whole"
    with DeltaWriter(store, model="m") as writer:
        push(writer, 1)
        push(writer, 2)
        shutil.copytree(store, intact_store)
        (rows,) = (store / "m/deltas/1").glob(f"{2:020d}.*.safetensors")
        rows.unlink()
        with (
            running(store, tmp_path / "log", *FOLLOW) as server,
            EmbedClient(server.http, retries=5, timeout_s=ANSWER_S_MAX) as client,
        ):
            wait_until(lambda: server.model()["deltas"]["state"] == "stalled")
            assert client.embed(BAGS).seq == 1
            compact_deltas(intact_store, "m")
            shutil.copytree(intact_store / "m/2", store / "m/.arriving")
            (store / "m/.arriving").rename(store / "m/2")
            wait_until(lambda: server.model()["version"] == 2)
            push(writer, 3)
            wait_until(lambda: client.embed(BAGS).seq == 3)
            result = client.embed(BAGS)
            assert (result.version, result.seq) == (2, 3)
            assert np.array_equal(result.values, np.repeat(3 * COUNTS, DIM, axis=1))
            wait_until(lambda: server.model()["deltas"]["state"] == "following")


def test_retrained_version_has_its_own_delta_line(store: Path, ranks: int, tmp_path: Path) -> None:
    options = ("--deltas", "follow", "--workers", "2")

    def load(name: str) -> httpx.Response:
        return httpx.post(
            f"{server.management}/admin/load", json={"model": name}, timeout=WAIT_S_MAX
        )

    def hold(action: str) -> None:
        done = httpx.post(
            f"{server.management}/admin/deltas/{action}", json={"model": "m"}, timeout=ANSWER_S_MAX
        )
        assert done.status_code == 200

    with (
        running(store, tmp_path / "log", *options, has_management_port=True) as server,
        EmbedClient(server.http, retries=5, timeout_s=ANSWER_S_MAX) as client,
    ):
        with DeltaWriter(store, model="m") as writer:
            push(writer, 1)
            push(writer, 2)
        wait_until(lambda: server.model()["deltas"]["seq"] == 2)
        assert publish_values(store, 5, ranks) == 2  # not in the line of version 1
        with DeltaWriter(store, model="m", version=2) as writer:
            push(writer, 1)
        hold("hold")
        rejected = load("m")
        assert (rejected.status_code, "its deltas are held" in rejected.text) == (409, True)
        assert client.embed(BAGS).version == 1
        # A worker that receives this failure late would take it for that of the next load.
        wait_until(lambda: all("next" in server.model() for _ in range(20)))
        hold("go-on")
        assert load("m").status_code == 200
        wait_until(lambda: {server.model()["version"] for _ in range(20)} == {2})  # in all workers
        result = client.embed(BAGS)
        assert (result.version, result.seq) == (2, 1)
        ids = np.array([[len(bag) for bag in bags] for bags in BAGS.values()]).T
        expected = COUNTS + 5 * (ids - COUNTS)
        assert np.array_equal(result.values, np.repeat(expected, DIM, axis=1))
        wait_until(lambda: server.model()["deltas"]["state"] == "following")
        shown = server.model()["deltas"]
        assert (shown["line"], shown["seq"]) == (2, 1)
        undo_deltas(store, "m", to=0, why="test", version=2)
        wait_until(lambda: client.embed(BAGS).seq == 2)
        assert np.array_equal(client.embed(BAGS).values, np.repeat(5 * ids, DIM, axis=1))
