"""Tests of served deltas: each is applied whole and in order, whichever process is killed."""

import os
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from delta_keys import key_pair
from e2e.delta_servers import (
    BAGS,
    CHANGED,
    COUNTS,
    DIM,
    PAUSE_S,
    WAIT_S_MAX,
    Callers,
    push,
    ranks,
    store,
    wait_until,
)
from running_servers import ANSWER_S_MAX, run_commands, running

from embedserve_client import EmbedClient, GrpcEmbedClient
from embedserve_store import (
    Bags,
    DeltaWriter,
    IdRule,
    TableSpec,
    compact_deltas,
    publish,
    undo_deltas,
)
from embedserve_store.format.delta_manifest import manifest_name

__all__ = ["ranks", "store"]

PUSHES = 40
SEEN_AT = 5
KILLED_AT = {"applier": 10, "worker": 20}
UNDONE = {27: 24, 30: 3}
"""Seq of each undo, and the seq that it reverts to.

One undoes the last deltas, which are in memory. The other undoes deltas from before the applier was
killed, which it reads from the store."""


@pytest.mark.parametrize("ranks", [2])
def test_each_result_is_from_one_delta_while_processes_are_killed(
    store: Path, tmp_path: Path
) -> None:
    options = ("--deltas", "follow", "--workers", "2", "--delta-memory", 1 << 20)
    with (
        DeltaWriter(store, model="m") as writer,
        running(store, tmp_path / "log", *map(str, options)) as server,
    ):
        applier, worker, _ = server.children()
        callers = Callers(server, UNDONE)
        try:
            for seq in range(1, PUSHES + 1):
                if seq in UNDONE:
                    wait_until(lambda: server.model()["deltas"]["seq"] == seq - 1)  # noqa: B023
                    undo_deltas(store, "m", to=UNDONE[seq], why="test")
                    writer.resume()
                    wait_until(lambda: seq in callers.seqs)  # noqa: B023
                    continue
                push(writer, seq)
                if seq == SEEN_AT:
                    wait_until(lambda: SEEN_AT in callers.seqs)
                if seq == KILLED_AT["applier"]:
                    os.kill(applier, signal.SIGKILL)
                if seq == KILLED_AT["worker"]:
                    os.kill(worker, signal.SIGKILL)
            wait_until(lambda: PUSHES in callers.seqs)
            wait_until(lambda: len(server.children()) == 3 and worker not in server.children())
        finally:
            callers.end()
        assert callers.wrong == []
        wait_until(lambda: server.model()["deltas"]["state"] == "following")
    log = (tmp_path / "log").read_text()
    for seq, target in UNDONE.items():
        assert f"delta {seq} reverts to delta {target}: test" in log


def test_damaged_delta_is_not_served_until_it_is_repaired(store: Path, tmp_path: Path) -> None:
    """Checks a delta that is copied to the store in a damaged state, and repaired."""
    published = tmp_path / "published"
    with DeltaWriter(store, model="m") as writer:
        push(writer, 1)
    shutil.copytree(store, published)
    with DeltaWriter(store, model="m") as writer:
        push(writer, 2)
    line = "m/deltas/1"
    (rows,) = (store / line).glob(f"{2:020d}.*.safetensors")
    intact_rows = rows.read_bytes()
    with (
        running(published, tmp_path / "log", "--deltas", "follow") as server,
        EmbedClient(server.http, timeout_s=ANSWER_S_MAX) as client,
    ):
        assert client.embed(BAGS).seq == 1  # ready with the first delta
        (published / line / rows.name).write_bytes(intact_rows[:-1] + b"!")
        shutil.copy(store / line / manifest_name(2), tmp_path)
        (tmp_path / manifest_name(2)).rename(published / line / manifest_name(2))
        wait_until(lambda: server.model()["deltas"]["state"] == "stalled")
        assert rows.name in server.model()["deltas"]["reason"]
        assert client.embed(BAGS).seq == 1
        (published / line / rows.name).write_bytes(intact_rows)
        wait_until(lambda: server.model()["deltas"]["state"] == "following")
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
        wait_until(lambda: server.model()["deltas"]["state"] == "stalled")
        shown = server.model()["deltas"]
        assert f"has no signature of a key in {pair.public}" in shown["reason"]
        assert shown["signatures"] == "required"
        assert client.embed(BAGS).seq == 0
        (store / "m/deltas/1" / manifest_name(1)).unlink()
        with DeltaWriter(store, model="m", key=pair.private) as writer:
            push(writer, 1)
        wait_until(lambda: server.model()["deltas"]["seq"] == 1)
        assert np.array_equal(client.embed(BAGS).values, np.repeat(COUNTS, DIM, axis=1))


def test_delta_whose_goldens_differ_is_not_served(store: Path, tmp_path: Path) -> None:
    bags = Bags(np.array([1, 2, 3]), np.array([[2], [1]], np.int32), None)

    def push_golden(writer: DeltaWriter, seq: int, golden: float) -> None:
        """Pushes delta ``seq``; its golden has the value ``golden`` for each id."""
        results = np.repeat(np.array([[2, 1]], np.float32) * golden, DIM, axis=1)
        changes = {
            name: (np.arange(count), np.full((count, DIM), seq, np.float32))
            for name, count in CHANGED.items()
        }
        assert writer.push_rows(changes, goldens=(bags, results)) == seq

    with (
        DeltaWriter(store, model="m") as writer,
        running(store, tmp_path / "log", "--deltas", "follow") as server,
        EmbedClient(server.http, timeout_s=ANSWER_S_MAX) as client,
    ):
        push_golden(writer, 1, 1)
        wait_until(lambda: server.model()["deltas"]["seq"] == 1)
        push_golden(writer, 2, 1)
        wait_until(lambda: server.model()["deltas"]["state"] == "stalled")
        reason = server.model()["deltas"]["reason"]
        assert "delta 2: goldens: 'user' (table 'user'), example 0, column 0: the rows " in reason
        push_golden(writer, 3, 3)
        assert np.array_equal(client.embed(BAGS).values, np.repeat(COUNTS, DIM, axis=1))
        undo_deltas(store, "m", to=1, why="wrong rows")
        wait_until(lambda: server.model()["deltas"]["seq"] == 4)
        assert np.array_equal(client.embed(BAGS).values, np.repeat(COUNTS, DIM, axis=1))
        writer.resume()
        push_golden(writer, 5, 5)
        wait_until(lambda: server.model()["deltas"]["seq"] == 5)
        assert np.array_equal(client.embed(BAGS).values, np.repeat(5 * COUNTS, DIM, axis=1))
    assert reason in (tmp_path / "log").read_text()


def publish_mixed(store: Path) -> None:
    """Publishes a model with a feature of two tables that the plan shards differently."""
    names = ("t", "u")
    weights = {f"ebc.embedding_bags.{name}.weight": torch.zeros(9, DIM) for name in names}
    tables = [TableSpec(name, 9, DIM, ("f",), "sum", "float32") for name in names]
    sharding = {"t": "row_wise", "u": "table_wise"}
    publish(weights, store, model="mixed", tables=tables, sharding=sharding, world_size=2)


def test_deltas_of_a_feature_of_two_tables_are_served(tmp_path: Path) -> None:
    store = tmp_path / "store"
    publish_mixed(store)
    with (
        DeltaWriter(store, model="mixed") as writer,
        running(store, tmp_path / "log", "--deltas", "follow") as server,
        EmbedClient(server.http, timeout_s=ANSWER_S_MAX) as client,
    ):
        writer.push_rows({"t": ([1, 8], np.full((2, DIM), 1.0, np.float32))})
        writer.push_rows({"u": ([2, 8], np.full((2, DIM), 10.0, np.float32))})
        wait_until(lambda: server.model()["deltas"]["seq"] == 2)
        result = client.embed({"f": [[1, 2, 8], [8], [0]]})
        assert result.seq == 2
        for key, sums in (("f@t", [2, 1, 0]), ("f@u", [20, 10, 0])):
            assert np.array_equal(result[key], np.repeat(np.array([sums]).T, DIM, axis=1))
    assert "the plan divides 't' by columns, into unequal" in (tmp_path / "log").read_text()


def test_each_result_has_the_ids_of_one_delta(tmp_path: Path) -> None:
    """Checks that no response mixes the ids of two deltas, also during a rollout.

    Three ids at a time share four rows: delta n adds id n + 3 and removes id n. The server switches
    to a compacted version, which has another vocabulary.
    """
    store, ids, pushes, compacted = tmp_path / "store", 3, 30, 15
    weights = {"ebc.embedding_bags.user.weight": torch.arange(1.0, 5)[:, None].repeat(1, DIM)}
    rule = IdRule("map", unknown="skip")
    tables = [TableSpec("user", ids + 1, DIM, ("user",), "sum", "float32", ids=rule)]
    publish(weights, store, model="m", tables=tables, vocabularies={"user": [1, 2, 3]})
    all_ids = {"user": [[one] for one in range(1, pushes + ids + 2)]}
    wrong, seqs, ended = [], set(), threading.Event()

    def check_results(client: EmbedClient | GrpcEmbedClient) -> None:
        with client:
            while not ended.wait(PAUSE_S):
                result = client.embed(all_ids)
                assert result.seq is not None
                expected = [n if 0 < n - result.seq <= ids else 0 for (n,) in all_ids["user"]]
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
        callers = [threading.Thread(target=check_results, args=(one,)) for one in clients]
        for caller in callers:
            caller.start()
        try:
            for seq in range(1, pushes + 1):
                rows = np.full((1, DIM), seq + ids, np.float32)
                writer.push_rows({"user": ([seq + ids], rows)}, removed={"user": [seq]})
                if seq % 5 == 0:
                    wait_until(lambda: max(seqs, default=0) == seq)  # noqa: B023
                if seq == compacted:
                    compact_deltas(store, "m")
            wait_until(
                lambda: {server.model()["version"] for _ in range(20)} == {2}
            )  # in all workers
        finally:
            ended.set()
            for caller in callers:
                caller.join(WAIT_S_MAX)
        assert not wrong
        assert server.model()["deltas"]["ids_changed"] == pushes - compacted + ids


def test_models_and_settings_that_cannot_follow_deltas_are_rejected(
    store: Path, tmp_path: Path
) -> None:
    weights = {"ebc.embedding_bags.t.weight": torch.zeros(9, 16)}
    tables = [TableSpec("t", 9, 16, ("f",), "sum", "float32")]
    publish(weights, store, model="wide", tables=tables, sharding="column_wise", world_size=2)
    publish_mixed(store)
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\xff garbage")
    rejections: dict[tuple[object, ...], str] = {
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
    commands = [(*common, *options) for options in rejections]
    for done, message in zip(run_commands(*commands), rejections.values(), strict=True):
        assert done.returncode
        assert message in done.stderr
