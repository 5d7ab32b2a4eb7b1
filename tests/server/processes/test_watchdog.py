"""Tests of the watchdog: a server of one process ends itself if its event loop hangs, and only
then."""

import asyncio
import signal
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest
from server.processes.test_drain import server_process

from embedserve.processes import watchdog
from embedserve.processes.supervisor import POLL_S, PREPARING_HANG_S

HANG_S = 2
pytestmark = pytest.mark.usefixtures("warm")


async def test_process_with_hung_event_loop_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as errors:
        async with server_process("native", hang_s=HANG_S, stderr=errors) as server:
            assert (await server.http.get("/health/live")).status_code == 200
            server.process.send_signal(signal.SIGUSR1)
            assert await server.wait_stopped() == 1
    text = log.read_text()
    assert "ERROR embedserve.processes.watchdog: the event loop hangs: no heartbeat for " in text
    assert "in hang_here" in text


async def test_frozen_process_continues_once_it_is_resumed() -> None:
    async with server_process("native", hang_s=HANG_S) as server:
        server.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(HANG_S + 2)  # nothing runs in it meanwhile
        server.process.send_signal(signal.SIGCONT)
        assert (await server.http.get("/health/live")).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert await server.wait_stopped() == 0


@pytest.mark.parametrize(("is_loading", "limit_s"), [(False, HANG_S), (True, PREPARING_HANG_S)])
def test_event_loop_may_be_silent_for_longer_while_a_version_loads(
    monkeypatch: pytest.MonkeyPatch, is_loading: bool, limit_s: float
) -> None:
    silent_s: list[float] = []
    monkeypatch.setattr(watchdog, "is_any_running", lambda: is_loading)
    monkeypatch.setattr(watchdog, "monotonic", count(0.0, POLL_S).__next__)
    monkeypatch.setattr(watchdog, "_end", silent_s.append)
    watching = watchdog.Watchdog(HANG_S)
    monkeypatch.setattr(watching, "_stopped", Mock(wait=lambda seconds: False))
    watching._watch()
    assert silent_s == [limit_s + POLL_S]
