"""Tests of the watchdog: a server of one process ends itself if its event loop hangs, and only
then."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from forkserver import PYTHON, WarmPopen
from server.python import environment

HANG_S = 2
WAIT_S_MAX = 60
SCRIPT = Path(__file__).parents[1] / "drain_server.py"
pytestmark = pytest.mark.usefixtures("warm")


@contextmanager
def watched_server(log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Runs a server of one process that may hang for HANG_S; yields its URL."""
    arguments = [SCRIPT, 0, 5, "native", HANG_S]
    with log.open("wb") as errors:
        process = WarmPopen(
            [*PYTHON, *map(str, arguments)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().split()[0].decode()
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_process_with_hung_event_loop_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with watched_server(log) as (process, url):
        assert httpx.get(f"{url}/health/live", timeout=WAIT_S_MAX).status_code == 200
        os.kill(process.pid, signal.SIGUSR1)
        assert process.wait(WAIT_S_MAX) == 1
    text = log.read_text()
    assert "ERROR embedserve.processes.watchdog: the event loop hangs: no heartbeat for " in text
    assert "in hang_here" in text


def test_frozen_process_continues_once_it_is_resumed(tmp_path: Path) -> None:
    with watched_server(tmp_path / "log") as (process, url):
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(HANG_S + 2)  # nothing runs in it meanwhile
        os.kill(process.pid, signal.SIGCONT)
        assert httpx.get(f"{url}/health/live", timeout=WAIT_S_MAX).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S_MAX) == 0
