"""Tests of the supervisor's applier: it starts and replaces it, and workers wait for its first
poll."""

import asyncio
import errno
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from server.processes.supervised_server import supervised
from server.waiting import WAIT_S_MAX, until

from embedserve.config import ServeSettings
from embedserve.processes.applier_supervision import HANG_S_MIN, ApplierSupervision
from embedserve.processes.rollout.delta_versions import DeltaVersions

pytestmark = pytest.mark.usefixtures("warm")
ERROR = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def fail() -> NoReturn:
    """Stands for a fork that fails for lack of memory."""
    raise ERROR


async def test_workers_listen_only_after_the_first_poll(tmp_path: Path) -> None:
    mode = tmp_path / "failure.deltas"
    mode.write_text("wait")
    async with supervised(tmp_path, workers=1, is_awaited=False) as server:
        await server.until_line("started 0")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await server.until_line("ready")
        mode.write_text("")
        await server.until_line("ready")
        await server.stop()


async def test_killed_applier_is_replaced_while_workers_serve(tmp_path: Path) -> None:
    (tmp_path / "failure.deltas").write_text("")
    async with supervised(tmp_path, workers=1, is_awaited=False) as server:
        applier = int((await server.until_line("applier"))[-1].split()[1])
        await server.until_ready()
        os.kill(applier, signal.SIGKILL)
        lines = await server.until_line("applier")
        assert any(f"(process {applier}) was ended by SIGKILL: restarted" in one for one in lines)
        assert lines[-1].split()[2] == "stalled"  # until the next one has polled
        assert await server.post() == 200
        output = await server.stop()
        assert "killed" not in output


async def test_hung_applier_is_replaced_while_workers_serve(tmp_path: Path) -> None:
    (tmp_path / "failure.deltas").write_text("")
    async with supervised(tmp_path, workers=1, hang_s=3, is_awaited=False) as server:
        hung = int((await server.until_line("applier"))[-1].split()[1])
        lines = [*await server.until_ready(), *await server.until_line("applier")]
        logged = "\n".join(lines)
        assert f"applier of deltas (process {hung}) hangs: no heartbeat for " in logged
        assert "in applier_main" in logged  # its stack
        assert f"(process {hung}) was ended by SIGABRT: restarted" in logged
        assert await server.post() == 200
        assert await server.metric("embedserve_worker_hangs_total") == 0
        await server.stop()


async def test_applier_that_exits_immediately_does_not_prevent_the_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "failure.deltas").write_text("end")
    async with supervised(tmp_path, workers=1) as server:
        assert await server.post() == 200


@pytest.fixture
def forked() -> Iterator[tuple[ApplierSupervision, Callable[[], None]]]:
    """Yields an applier, and a function that has it send a heartbeat and waits for that."""
    read, write = os.pipe()
    selector = selectors.DefaultSelector()

    def main(channel: socket.socket) -> int:
        while os.read(read, 1):
            channel.send(b"\n")
        return 0

    def beat() -> None:
        os.write(write, b"!")
        ((key, events),) = selector.select(WAIT_S_MAX)
        key.data(events)

    applier = ApplierSupervision(
        main, DeltaVersions(ServeSettings(store=""), {}), selector, lambda: os.close(write)
    )
    applier.check()
    yield applier, beat
    applier.signal(signal.SIGKILL)
    os.waitpid(applier.pid, 0)
    applier.close()
    selector.close()
    os.close(read)
    os.close(write)


async def test_only_an_applier_without_heartbeats_is_replaced(
    forked: tuple[ApplierSupervision, Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    applier, beat = forked
    pid = applier.pid
    applier.check_heartbeat(10 * HANG_S_MIN, 0)  # no limit
    for _ in range(3):
        applier.check_heartbeat(HANG_S_MIN - 1, 10)
        beat()
    applier.check_heartbeat(HANG_S_MIN + 1, 2 * HANG_S_MIN)  # the limit is above the minimum
    beat()
    applier.check()
    assert (applier.pid, caplog.messages) == (pid, [])
    os.kill(pid, signal.SIGSTOP)  # SIGABRT cannot end it

    def is_replaced() -> bool:
        applier.check_heartbeat(0.0, 10)
        applier.check()
        return applier.pid not in (0, pid)

    applier.check_heartbeat(HANG_S_MIN + 1, 10)
    await until(is_replaced)
    hangs, ended = caplog.messages
    assert f"(process {pid}) hangs: no heartbeat for {HANG_S_MIN + 1:.0f} s" in hangs
    assert f"(process {pid}) was ended by SIGKILL: restarted" in ended
    applier.check_heartbeat(HANG_S_MIN - 1, 10)  # a new applier has a new heartbeat time
    beat()
    applier.check()
    assert len(caplog.messages) == 2


async def test_failed_fork_of_a_new_applier_is_retried_later(
    forked: tuple[ApplierSupervision, Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    applier, beat = forked
    pid = applier.pid

    def is_replaced() -> bool:
        applier.check()
        return bool(applier.pid)

    def has_failed() -> bool:
        applier.check()
        return len(caplog.messages) == 2

    with monkeypatch.context() as patched:
        patched.setattr(os, "fork", fail)
        os.kill(pid, signal.SIGKILL)
        await until(has_failed)
    ended, failed = caplog.messages
    assert ended.endswith("was ended by SIGKILL: restarted")
    assert failed == f"the applier of deltas cannot be started: {ERROR}; it is tried again in 1 s"
    await until(is_replaced)
    beat()
    assert len(caplog.messages) == 2


def test_failed_fork_of_the_first_applier_fails_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with selectors.DefaultSelector() as selector:
        followed = DeltaVersions(ServeSettings(store=""), {})
        applier = ApplierSupervision(lambda channel: 0, followed, selector, lambda: None)
        monkeypatch.setattr(os, "fork", fail)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            applier.check()
