"""Tests of held deltas, and of aliases bound to a delta, whichever process is killed."""

import os
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest
from e2e.delta_servers import BAGS, COUNTS, DIM, push, ranks, store, wait_until
from running_servers import ANSWER_S_MAX, running

from embedserve.commands.admin import ask_server
from embedserve.commands.running_server import ServerClient
from embedserve_client import EmbedClient
from embedserve_store import DeltaWriter, set_alias

__all__ = ["ranks", "store"]
HOLD = "/admin/deltas/hold"


def test_hold_survives_killed_processes_until_it_is_released(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--deltas", "follow", "--workers", "2", "--tables", "resident")
    with (
        DeltaWriter(store, model="m") as writer,
        running(store, tmp_path / "log", *options, has_management_port=True) as server,
    ):

        def seq() -> int:
            """Returns the seq of a response over a new connection, which any worker may accept."""
            with EmbedClient(server.http, retries=5, timeout_s=ANSWER_S_MAX) as client:
                result = client.embed(BAGS)
            assert result.seq is not None
            assert np.array_equal(result.values, np.repeat(result.seq * COUNTS, DIM, axis=1))
            return result.seq

        push(writer, 1)
        wait_until(lambda: seq() == 1)
        ask_server(ServerClient(server.management), "deltas hold", "m")
        assert "m: held at seq 1\n" in capfd.readouterr().err
        for pushed in (2, 3):
            push(writer, pushed)
            wait_until(lambda: server.model()["deltas"]["wanted_seq"] == pushed)  # noqa: B023
        applier, worker, _ = server.children()
        for pid in (worker, applier):
            os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: len(server.children()) == 3 and not {applier, worker} & {*server.children()}
        )
        push(writer, 4)
        wait_until(lambda: server.model()["deltas"]["wanted_seq"] == 4)
        wait_until(lambda: "is ready again" in server.log.read_text())
        shown = server.model()["deltas"]
        assert (shown["state"], shown["seq"], shown["lag_s"] > 0) == ("held", 1, True)
        assert {seq() for _ in range(20)} == {1}
        metrics = server.metrics()
        assert 'embedserve_delta_held{alias="",model="m"} 1.0' in metrics
        url = f"{server.http}/models/m/embed"
        response = httpx.post(url, json={"features": BAGS, "min_seq": 2}, timeout=ANSWER_S_MAX)
        assert (response.status_code, "at seq 1" in response.text) == (503, True)
        assert (
            httpx.post(
                f"{server.http}{HOLD}", json={"model": "m"}, timeout=ANSWER_S_MAX
            ).status_code
            == 404
        )
        ask_server(ServerClient(server.management), "deltas go-on", "m")
        wait_until(lambda: {seq() for _ in range(20)} == {4})
        assert server.model()["deltas"]["state"] == "following"
    log = (tmp_path / "log").read_text()
    assert "m: deltas hold, as requested" in log
    assert "m: deltas are held no longer" in log


def test_bound_alias_stays_at_its_delta_while_another_alias_follows(
    store: Path, tmp_path: Path
) -> None:
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
            wait_until(lambda: seqs("m@canary") == {5})
            stable, canary = server.models()
            found = [
                (one["deltas"].get("at_seq"), one["deltas"]["state"]) for one in (stable, canary)
            ]
            assert found == [(2, "following"), (None, "following")]
            assert (stable["deltas"]["wanted_seq"], stable["deltas"]["lag_s"]) == (2, 0)
            body = {"features": BAGS, "min_seq": 3}
            response = httpx.post(
                f"{server.http}/models/m@stable/embed", json=body, timeout=ANSWER_S_MAX
            )
            assert (response.status_code, "at seq 2" in response.text) == (503, True)
            set_alias(store, "m", "stable", 1, at_seq=1)
            wait_until(lambda: seqs("m@stable") == {1})
            for pid in server.children()[:2]:
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: "is ready again" in server.log.read_text())
            push(writer, 6)
            wait_until(lambda: seqs("m@canary") == {6})
            assert seqs("m@stable") == {1}
            wait_until(lambda: "embedserve_shadow_vectors_total" in server.metrics())
            set_alias(store, "m", "stable", 1)
            wait_until(lambda: seqs("m@stable") == {6})
        log = (tmp_path / "log").read_text()
    assert "m@stable: goes back to delta 1, the last that it may have" in log
    assert "Traceback" not in log
