"""Tests of served deltas: each is applied whole and in order, whichever process is killed."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from delta_keys import key_pair
from running_servers import ANSWER_S_MAX, Running, free_port, run_commands, running

from embedserve.commands.admin import ask_server
from embedserve.commands.running_server import ServerClient
from embedserve_client import EmbedClient, GrpcEmbedClient
from embedserve_client.errors import EmbedServeClientError
from embedserve_store import (
    Bags,
    DeltaWriter,
    IdRule,
    TableSpec,
    compact_deltas,
    publish,
    set_alias,
    undo_deltas,
)
from embedserve_store.format.delta_manifest import manifest_name

ROWS = {"user": 1000, "item": 50}
CHANGED = {"user": 300, "item": 50}
DIM = 8
PUSHES = 40
SEEN_AT = 5
KILLED_AT = {"applier": 10, "worker": 20}
UNDONE = {27: 24, 30: 3}
"""Seq of each undo, and the seq that it reverts to.

One undoes the last deltas, which are in memory. The other undoes deltas from before the applier was
killed, which it reads from the store."""
WAIT_S_MAX = 120
PAUSE_S = 0.01
"""Seconds between a client's requests, so that servers that apply deltas get the cores."""
LOOK_S = 0.05
HOLD = "/admin/deltas/hold"
BAGS = {"user": [[1, 2, 500], [299]], "item": [[3], [0, 49]]}
COUNTS = np.array([[2, 1], [1, 2]])
"""Number of changed rows in the bags, by example and key."""


@pytest.fixture
def ranks() -> int:
    """Returns the number of ranks of the model.

    With more than one, each worker compiles its lookups, which takes a second.
    """
    return 1


@pytest.fixture
def store(tmp_path: Path, ranks: int) -> Path:
    store = tmp_path / "store"
    publish_values(store, 0, ranks)
    return store


def publish_values(store: Path, value: float, ranks: int) -> int:
    """Publishes a version in which every value is ``value``."""
    weights = {
        f"ebc.embedding_bags.{name}.weight": torch.full((rows, DIM), value, dtype=torch.float32)
        for name, rows in ROWS.items()
    }
    tables = [TableSpec(name, rows, DIM, (name,), "sum", "float32") for name, rows in ROWS.items()]
    return publish(
        weights, store, model="m", tables=tables, sharding="row_wise", world_size=ranks
    ).version


def push(writer: DeltaWriter, seq: int) -> None:
    """Pushes delta ``seq``, in which every value of the changed rows is its seq."""
    changes = {
        name: (np.arange(count), np.full((count, DIM), seq, np.float32))
        for name, count in CHANGED.items()
    }
    assert writer.push_rows(changes, step=10 * seq) == seq


def until(is_true: Callable[[], Any]) -> None:
    ends_s = time.monotonic() + WAIT_S_MAX
    while True:
        with suppress(httpx.TransportError):  # the worker was killed meanwhile
            if is_true():
                return
        assert time.monotonic() < ends_s
        time.sleep(LOOK_S)


def children(server: Running) -> list[int]:
    """Returns the process ids of the applier and the workers, in the order of their start."""
    pid = server.process.pid
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def deltas(url: str) -> dict[str, Any]:
    """Returns the state of the deltas from /models of a server."""
    (model,) = httpx.get(f"{url}/models", timeout=ANSWER_S_MAX).json()["models"]
    found: dict[str, Any] = model["deltas"]
    return found


def version(url: str) -> int:
    """Returns the version that a worker of the server serves."""
    (model,) = httpx.get(f"{url}/models", timeout=ANSWER_S_MAX).json()["models"]
    return int(model["version"])


class Callers:
    """Clients over REST and gRPC that check that each result has the values of its seq."""

    def __init__(self, server: Running, undone: Mapping[int, int] | None = None) -> None:
        """Starts the clients.

        Args:
            undone: seq of each undo to the seq that it reverts to.
        """
        self._undone = undone or {}
        self.wrong: list[str] = []
        self.failures: list[str] = []
        self.seqs: set[int] = set()
        self.last_seq = 0
        self._stop = threading.Event()
        options: dict[str, Any] = {"retries": 5, "timeout_s": ANSWER_S_MAX}
        clients = [EmbedClient(server.http, **options), GrpcEmbedClient(server.grpc, **options)]
        self._threads = [threading.Thread(target=self._ask, args=(one,)) for one in clients]
        for thread in self._threads:
            thread.start()

    def _ask(self, client: EmbedClient | GrpcEmbedClient) -> None:
        last = 0
        with client:
            while not self._stop.wait(PAUSE_S):
                try:
                    result = client.embed(BAGS)
                except EmbedServeClientError as error:  # the worker was killed
                    self.failures.append(repr(error))
                    continue
                seq = result.seq
                value = self._undone.get(seq or 0, seq or 0)
                expected = np.repeat(COUNTS * value, DIM, axis=1)
                if seq is None or not (result.values == expected).all():
                    self.wrong.append(f"seq {seq}: {result.values.tolist()}")
                    continue
                self.seqs.add(seq)
                self.last_seq = max(self.last_seq, seq)
                if seq < last:
                    self.wrong.append(f"seq {seq} after {last}")
                last = seq

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S_MAX)


@pytest.mark.parametrize("ranks", [2])
def test_every_answer_is_of_one_delta_while_processes_are_killed(
    store: Path, tmp_path: Path
) -> None:
    options = ("--deltas", "follow", "--workers", "2", "--delta-memory", 1 << 20)
    with (
        DeltaWriter(store, model="m") as writer,
        running(store, tmp_path / "log", *map(str, options)) as server,
    ):
        applier, worker, _ = children(server)
        callers = Callers(server, UNDONE)
        try:
            for seq in range(1, PUSHES + 1):
                if seq in UNDONE:
                    until(lambda: deltas(server.http)["seq"] == seq - 1)  # noqa: B023
                    undo_deltas(store, "m", to=UNDONE[seq], why="test")
                    writer.resume()
                    until(lambda: seq in callers.seqs)  # noqa: B023
                    continue
                push(writer, seq)
                if seq == SEEN_AT:
                    until(lambda: SEEN_AT in callers.seqs)
                if seq == KILLED_AT["applier"]:
                    os.kill(applier, signal.SIGKILL)
                if seq == KILLED_AT["worker"]:
                    os.kill(worker, signal.SIGKILL)
            until(lambda: PUSHES in callers.seqs)
            until(lambda: len(children(server)) == 3 and worker not in children(server))
        finally:
            callers.end()
        assert callers.wrong == []
        until(lambda: deltas(server.http)["state"] == "following")
    log = (tmp_path / "log").read_text()
    for seq, target in UNDONE.items():
        assert f"delta {seq} reverts to delta {target}: test" in log


def test_a_damaged_delta_changes_nothing_until_it_is_repaired(store: Path, tmp_path: Path) -> None:
    """Checks a delta that is copied to the store in a damaged state, and repaired."""
    published = tmp_path / "published"
    with DeltaWriter(store, model="m") as writer:
        push(writer, 1)
    shutil.copytree(store, published)
    with DeltaWriter(store, model="m") as writer:
        push(writer, 2)
    line = "m/deltas/1"
    (rows,) = (store / line).glob(f"{2:020d}.*.safetensors")
    whole = rows.read_bytes()
    with (
        running(published, tmp_path / "log", "--deltas", "follow") as server,
        EmbedClient(server.http, timeout_s=ANSWER_S_MAX) as client,
    ):
        assert client.embed(BAGS).seq == 1  # ready with the first delta
        (published / line / rows.name).write_bytes(whole[:-1] + b"!")
        shutil.copy(store / line / manifest_name(2), tmp_path)
        (tmp_path / manifest_name(2)).rename(published / line / manifest_name(2))
        until(lambda: deltas(server.http)["state"] == "stalled")
        assert rows.name in deltas(server.http)["reason"]
        assert client.embed(BAGS).seq == 1
        (published / line / rows.name).write_bytes(whole)
        until(lambda: deltas(server.http)["state"] == "following")
        result = client.embed(BAGS)
        assert result.seq == 2
        assert np.array_equal(result.values, np.repeat(2 * COUNTS, DIM, axis=1))
    assert rows.name in (tmp_path / "log").read_text()


def test_only_signed_deltas_are_served(store: Path, tmp_path: Path) -> None:
    pair = key_pair(tmp_path)
    options = ("--deltas", "follow", "--delta-key", pair.public)
    with (
        running(store, tmp_path / "log", *options) as server,
        EmbedClient(server.http, timeout_s=ANSWER_S_MAX) as client,
    ):
        with DeltaWriter(store, model="m") as writer:
            push(writer, 1)
        until(lambda: deltas(server.http)["state"] == "stalled")
        shown = deltas(server.http)
        assert f"has no signature of a key in {pair.public}" in shown["reason"]
        assert shown["signatures"] == "required"
        assert client.embed(BAGS).seq == 0
        (store / "m/deltas/1" / manifest_name(1)).unlink()
        with DeltaWriter(store, model="m", key=pair.private) as writer:
            push(writer, 1)
        until(lambda: deltas(server.http)["seq"] == 1)
        assert np.array_equal(client.embed(BAGS).values, np.repeat(COUNTS, DIM, axis=1))


def test_a_delta_with_other_results_than_training_is_not_served(
    store: Path, tmp_path: Path
) -> None:
    bags = Bags(np.array([1, 2, 3]), np.array([[2], [1]], np.int32), None)

    def push_golden(writer: DeltaWriter, seq: int, golden: float) -> None:
        """Pushes delta ``seq``; its golden has the value ``golden`` for each id."""
        answers = np.repeat(np.array([[2, 1]], np.float32) * golden, DIM, axis=1)
        changes = {
            name: (np.arange(count), np.full((count, DIM), seq, np.float32))
            for name, count in CHANGED.items()
        }
        assert writer.push_rows(changes, goldens=(bags, answers)) == seq

    with (
        DeltaWriter(store, model="m") as writer,
        running(store, tmp_path / "log", "--deltas", "follow") as server,
        EmbedClient(server.http, timeout_s=ANSWER_S_MAX) as client,
    ):
        push_golden(writer, 1, 1)
        until(lambda: deltas(server.http)["seq"] == 1)
        push_golden(writer, 2, 1)
        until(lambda: deltas(server.http)["state"] == "stalled")
        reason = deltas(server.http)["reason"]
        assert "delta 2: goldens: 'user' (table 'user'), example 0, column 0: the rows " in reason
        push_golden(writer, 3, 3)
        assert np.array_equal(client.embed(BAGS).values, np.repeat(COUNTS, DIM, axis=1))
        undo_deltas(store, "m", to=1, why="wrong rows")
        until(lambda: deltas(server.http)["seq"] == 4)
        assert np.array_equal(client.embed(BAGS).values, np.repeat(COUNTS, DIM, axis=1))
        writer.resume()
        push_golden(writer, 5, 5)
        until(lambda: deltas(server.http)["seq"] == 5)
        assert np.array_equal(client.embed(BAGS).values, np.repeat(5 * COUNTS, DIM, axis=1))
    assert reason in (tmp_path / "log").read_text()


def test_a_hold_outlives_processes_until_it_ends(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    management_port = free_port()
    options = ("--deltas", "follow", "--workers", "2", "--tables", "resident")
    management = f"http://127.0.0.1:{management_port}"
    with (
        DeltaWriter(store, model="m") as writer,
        running(store, tmp_path / "log", *options, management_port=management_port) as server,
    ):

        def seq() -> int:
            """Returns the seq of a response over a new connection, which any worker may accept."""
            with EmbedClient(server.http, retries=5, timeout_s=ANSWER_S_MAX) as client:
                result = client.embed(BAGS)
            assert result.seq is not None
            assert np.array_equal(result.values, np.repeat(result.seq * COUNTS, DIM, axis=1))
            return result.seq

        push(writer, 1)
        until(lambda: seq() == 1)
        ask_server(ServerClient(management), "deltas hold", "m")
        assert "m: held at seq 1\n" in capfd.readouterr().err
        for pushed in (2, 3):
            push(writer, pushed)
            until(lambda: deltas(management)["wanted_seq"] == pushed)  # noqa: B023
        applier, worker, _ = children(server)
        for pid in (worker, applier):
            os.kill(pid, signal.SIGKILL)
        until(lambda: len(children(server)) == 3 and not {applier, worker} & {*children(server)})
        push(writer, 4)
        until(lambda: deltas(management)["wanted_seq"] == 4)
        until(lambda: "is ready again" in server.log.read_text())
        shown = deltas(management)
        assert (shown["state"], shown["seq"], shown["lag_s"] > 0) == ("held", 1, True)
        assert {seq() for _ in range(20)} == {1}
        metrics = httpx.get(f"{management}/metrics", timeout=ANSWER_S_MAX).text
        assert 'embedserve_delta_held{alias="",model="m"} 1.0' in metrics
        url = f"{server.http}/models/m/embed"
        answer = httpx.post(url, json={"features": BAGS, "min_seq": 2}, timeout=ANSWER_S_MAX)
        assert (answer.status_code, "at seq 1" in answer.text) == (503, True)
        assert (
            httpx.post(
                f"{server.http}{HOLD}", json={"model": "m"}, timeout=ANSWER_S_MAX
            ).status_code
            == 404
        )
        ask_server(ServerClient(management), "deltas go-on", "m")
        until(lambda: {seq() for _ in range(20)} == {4})
        assert deltas(management)["state"] == "following"
    log = (tmp_path / "log").read_text()
    assert "m: deltas hold, as requested" in log
    assert "m: deltas are held no longer" in log


def test_an_alias_stays_at_a_delta_beside_one_that_follows(store: Path, tmp_path: Path) -> None:
    """Checks two aliases of a version: one bound to a delta, one that follows, and their shadow.

    The rows of the bound alias follow its changes in both directions, whichever process is killed.
    """
    options = ["--workers", "2", "--deltas", "follow", "--follow", "alias", "--follow-s", "0.1"]
    names = ("--model", "m@stable", "--model", "m@canary")
    with DeltaWriter(store, model="m") as writer:
        for pushed in (1, 2, 3, 4):
            push(writer, pushed)
        set_alias(store, "m", "stable", 1, at_seq=2)
        set_alias(store, "m", "canary", 1, shadow=100)
        with running(store, tmp_path / "log", *names, *options) as server:

            def seqs(name: str) -> set[int | None]:
                """Returns the seqs of ten responses from any workers, and checks their values."""
                found = set()
                for _ in range(10):
                    with EmbedClient(server.http, retries=5, timeout_s=ANSWER_S_MAX) as client:
                        result = client.embed(BAGS, model=name)
                    values = np.repeat((result.seq or 0) * COUNTS, DIM, axis=1)
                    assert np.array_equal(result.values, values)
                    found.add(result.seq)
                return found

            assert (seqs("m@stable"), seqs("m@canary")) == ({2}, {4})
            push(writer, 5)
            until(lambda: seqs("m@canary") == {5})
            stable, canary = httpx.get(f"{server.http}/models", timeout=ANSWER_S_MAX).json()[
                "models"
            ]
            found = [
                (one["deltas"].get("at_seq"), one["deltas"]["state"]) for one in (stable, canary)
            ]
            assert found == [(2, "following"), (None, "following")]
            assert (stable["deltas"]["wanted_seq"], stable["deltas"]["lag_s"]) == (2, 0)
            body = {"features": BAGS, "min_seq": 3}
            answer = httpx.post(
                f"{server.http}/models/m@stable/embed", json=body, timeout=ANSWER_S_MAX
            )
            assert (answer.status_code, "at seq 2" in answer.text) == (503, True)
            set_alias(store, "m", "stable", 1, at_seq=1)
            until(lambda: seqs("m@stable") == {1})
            for pid in children(server)[:2]:
                os.kill(pid, signal.SIGKILL)
            until(lambda: "is ready again" in server.log.read_text())
            push(writer, 6)
            until(lambda: seqs("m@canary") == {6})
            assert seqs("m@stable") == {1}
            until(lambda: "embedserve_shadow_vectors_total" in _metrics(server))
            set_alias(store, "m", "stable", 1)
            until(lambda: seqs("m@stable") == {6})
        log = (tmp_path / "log").read_text()
    assert "m@stable: goes back to delta 1, the last that it may have" in log
    assert "Traceback" not in log


def _metrics(server: Running) -> str:
    return httpx.get(f"{server.http}/metrics", timeout=ANSWER_S_MAX).text


def publish_mixed(store: Path) -> None:
    """Publishes a model with a feature of two tables that the plan shards differently."""
    names = ("t", "u")
    weights = {f"ebc.embedding_bags.{name}.weight": torch.zeros(9, DIM) for name in names}
    tables = [TableSpec(name, 9, DIM, ("f",), "sum", "float32") for name in names]
    sharding = {"t": "row_wise", "u": "table_wise"}
    publish(weights, store, model="mixed", tables=tables, sharding=sharding, world_size=2)


def test_a_feature_of_two_tables_is_followed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    publish_mixed(store)
    with (
        DeltaWriter(store, model="mixed") as writer,
        running(store, tmp_path / "log", "--deltas", "follow") as server,
        EmbedClient(server.http, timeout_s=ANSWER_S_MAX) as client,
    ):
        writer.push_rows({"t": ([1, 8], np.full((2, DIM), 1.0, np.float32))})
        writer.push_rows({"u": ([2, 8], np.full((2, DIM), 10.0, np.float32))})
        until(lambda: deltas(server.http)["seq"] == 2)
        result = client.embed({"f": [[1, 2, 8], [8], [0]]})
        assert result.seq == 2
        for key, sums in (("f@t", [2, 1, 0]), ("f@u", [20, 10, 0])):
            assert np.array_equal(result[key], np.repeat(np.array([sums]).T, DIM, axis=1))
    assert "the plan divides 't' by columns, into unequal" in (tmp_path / "log").read_text()


def test_each_answer_has_the_ids_of_one_delta(tmp_path: Path) -> None:
    """Checks that no response mixes the ids of two deltas, also during a rollout.

    Three ids at a time share four rows: delta n adds id n + 3 and removes id n. The server switches
    to a compacted version, which has another vocabulary.
    """
    store, ids, pushes, compacted = tmp_path / "store", 3, 30, 15
    weights = {"ebc.embedding_bags.user.weight": torch.arange(1.0, 5)[:, None].repeat(1, DIM)}
    rule = IdRule("map", unknown="skip")
    tables = [TableSpec("user", ids + 1, DIM, ("user",), "sum", "float32", ids=rule)]
    publish(weights, store, model="m", tables=tables, vocabularies={"user": [1, 2, 3]})
    asked = {"user": [[one] for one in range(1, pushes + ids + 2)]}
    wrong, seqs, ended = [], set(), threading.Event()

    def ask(client: EmbedClient | GrpcEmbedClient) -> None:
        with client:
            while not ended.wait(PAUSE_S):
                result = client.embed(asked)
                assert result.seq is not None
                expected = [n if 0 < n - result.seq <= ids else 0 for (n,) in asked["user"]]
                if result.values[:, 0].tolist() != expected:
                    wrong.append((result.seq, result.values[:, 0].tolist()))
                seqs.add(result.seq)

    options = ("--deltas", "follow", "--workers", "2", "--follow", "latest", "--follow-s", "0.1")
    with (
        DeltaWriter(store, model="m") as writer,
        running(store, tmp_path / "log", *options) as server,
    ):
        clients = (
            EmbedClient(server.http, timeout_s=ANSWER_S_MAX),
            GrpcEmbedClient(server.grpc, timeout_s=ANSWER_S_MAX),
        )
        callers = [threading.Thread(target=ask, args=(one,)) for one in clients]
        for caller in callers:
            caller.start()
        try:
            for seq in range(1, pushes + 1):
                rows = np.full((1, DIM), seq + ids, np.float32)
                writer.push_rows({"user": ([seq + ids], rows)}, removed={"user": [seq]})
                if seq % 5 == 0:
                    until(lambda: max(seqs, default=0) == seq)  # noqa: B023
                if seq == compacted:
                    compact_deltas(store, "m")
            until(lambda: {version(server.http) for _ in range(20)} == {2})  # in all workers
        finally:
            ended.set()
            for caller in callers:
                caller.join(WAIT_S_MAX)
        assert not wrong
        assert deltas(server.http)["ids_changed"] == pushes - compacted + ids


def test_what_cannot_follow_deltas_is_refused(store: Path, tmp_path: Path) -> None:
    weights = {"ebc.embedding_bags.t.weight": torch.zeros(9, 16)}
    tables = [TableSpec("t", 9, 16, ("f",), "sum", "float32")]
    publish(weights, store, model="wide", tables=tables, sharding="column_wise", world_size=2)
    publish_mixed(store)
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\xff garbage")
    refused: dict[tuple[object, ...], str] = {
        ("--model", "wide", "--strict-plan"): "so that rows cannot change: refused, as strict_plan",
        ("--model", "mixed", "--strict-plan"): "the plan divides 't' by columns, into unequal",
        ("--devices", "cuda", "--workers", "2"): "workers is 2, but the tables go to GPUs",
        ("--follow", "latest", "--tables", "resident"): (
            "follow is 'latest', but a version that comes while workers run cannot be copied into "
            "memory that they share: use --tables mapped\n"
        ),
        ("--delta-poll-s", "0.001"): "delta_poll_s is 0.001, expected 0.01 to 3600",
        ("--delta-key", garbage): f"delta key {garbage}: has 0 public keys in PEM, expected 1 to",
    }
    common = ("serve", store, "--deltas", "follow", "--http-port", "0", "--grpc-port", "0")
    commands = [(*common, *options) for options in refused]
    for done, message in zip(run_commands(*commands), refused.values(), strict=True):
        assert done.returncode
        assert message in done.stderr
