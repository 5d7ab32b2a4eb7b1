"""Tests of the supervisor: workers start together, and stop together."""

import asyncio
import logging
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path

import httpx
import pytest
from server.processes.supervised_server import WAIT_S_MAX, supervised

from embedserve.metrics.metrics import CounterRoom
from embedserve.metrics.model_metrics import COLUMNS_MIN
from embedserve.metrics.shared_counters import SharedCounters, WorkerCounters
from embedserve.processes.forked import HangWatch
from embedserve.processes.rollout.coordinator import RolloutCoordinator
from embedserve.processes.rollout.messages import (
    LoadState,
    NameStatus,
    StartReport,
    WorkerStatus,
    message_to_bytes,
)
from embedserve.processes.rollout.served_name import RolloutVersion
from embedserve.processes.supervisor import PREPARING_HANG_S, Supervisor

pytestmark = pytest.mark.usefixtures("warm")


async def test_all_workers_serve_and_stop_on_sigterm(tmp_path: Path) -> None:
    async with supervised(tmp_path, workers=3, is_warm=False) as server:
        assert len(server.worker_pids()) == 3
        assert await asyncio.gather(*(server.post() for _ in range(40))) == [200] * 40
        assert await server.metric("embedserve_workers") == 3
        await server.until_metric("embedserve_requests_total", lambda value: value >= 40)
        output = await server.stop()
    assert output.endswith("imported:\n")  # the supervisor imports no module with threads
    assert output.count("draining") == 3


async def test_no_worker_responds_before_the_startup_server_has_ended(tmp_path: Path) -> None:
    """Checks that a caller who knows that the server is ready gets no response of the startup
    server. A request that comes meanwhile waits, and is not rejected."""
    (tmp_path / "failure.asked").touch()
    async with supervised(tmp_path, workers=1, is_awaited=False) as server:
        lines = await server.until_ready()
        assert lines == ["started 0", "waited", lines[-1]]
        assert await server.post() == 200
        await server.stop()


async def test_unix_socket_serves_while_a_worker_is_stopped_or_killed(
    tmp_path: Path,
) -> None:
    async with supervised(tmp_path) as server:
        uds = str(server.socket_file)
        assert await asyncio.gather(*(server.post(uds) for _ in range(20))) == [200] * 20
        os.kill(server.worker_pids()[0], signal.SIGSTOP)  # the others take its connections
        assert await asyncio.gather(*(server.post(uds) for _ in range(20))) == [200] * 20
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        assert await asyncio.gather(*(server.post(uds) for _ in range(20))) == [200] * 20
        assert server.socket_file.exists()
        output = await server.stop()
    assert "Traceback" not in output
    assert not server.socket_file.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_accepted_requests_are_answered_if_all_processes_are_signalled(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Covers a terminal's SIGINT and systemd's SIGTERM, which reach the supervisor and every
    worker."""
    async with supervised(tmp_path, drain_s=60, lookup_s=1.5) as server:
        sockets = (None, str(server.socket_file))
        posts = [
            asyncio.create_task(server.post(socket_file))
            for socket_file in sockets
            for _ in range(5)
        ]
        queued, started = "embedserve_queue_requests", "embedserve_queue_wait_seconds_count"
        async with asyncio.timeout(WAIT_S_MAX):
            while await server.metric(queued, started) < len(posts):
                assert all(post.result() == 200 for post in posts if post.done())
                await asyncio.sleep(0.02)
        os.killpg(server.process.pid, number)
        assert await asyncio.gather(*posts) == [200] * len(posts)
        status, output = await server.ended()
    assert status == 0
    assert output.count("draining") == 2
    assert "Traceback" not in output


async def test_second_signal_ends_all_workers_immediately(tmp_path: Path) -> None:
    async with supervised(tmp_path, drain_s=600, lookup_s=600) as server:
        post = asyncio.create_task(server.post())
        await server.until_metric("embedserve_queue_wait_seconds_count", lambda value: value >= 1)
        server.process.terminate()
        await server.until_line("INFO embedserve.processes.server: draining")
        server.process.terminate()
        status, output = await server.ended()
        with pytest.raises(httpx.TransportError):
            await post
    assert status == 0
    assert "workers are killed: a second signal came" in output


async def test_worker_failure_during_startup_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "failure").write_text("tables are damaged")
    async with supervised(tmp_path, is_awaited=False) as server:
        status, output = await server.ended()
    assert status == 1
    assert "failed: tables are damaged" in output
    assert "Traceback" not in output


async def test_workers_stop_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    async with supervised(tmp_path) as server:
        server.process.kill()
        _, output = await server.ended()  # the pipe closes with the last worker
    assert output.count("the supervisor is gone") == 2
    assert output.count("stopped") == 2


async def test_a_worker_that_does_not_drain_is_killed(tmp_path: Path) -> None:
    async with supervised(tmp_path, drain_s=0.1) as server:
        os.kill(server.worker_pids()[0], signal.SIGSTOP)
        output = await server.stop()
    assert "workers are killed: they did not end in time" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_stops_a_server_that_is_not_ready_yet(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with supervised(tmp_path, is_awaited=False) as server:
        await server.until_line("started")
        server.process.send_signal(number)
        status, output = await server.ended()
    assert status == 0
    assert "Traceback" not in output


def test_worker_that_loads_a_version_may_be_silent_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks the limits of workers that listen. Silence counts only while the supervisor ran."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    counters = SharedCounters(3, CounterRoom(1, COLUMNS_MIN).cells)
    coordinator = RolloutCoordinator({}, lambda name, path: None)
    monkeypatch.setattr(coordinator, "is_preparing", lambda worker: worker == 1)
    supervisor = Supervisor(wait_for_signal, counters, 1, 10, coordinator)
    for worker in supervisor._workers:
        worker.pid, worker.is_listening = 100 + worker.index, worker.index != 2
        worker.hang_watch = HangWatch("it", logging.getLogger())

    def pass_time(seconds: float, step_s: float) -> None:
        for _ in range(int(seconds / step_s)):
            now_s = supervisor._checked_s + step_s
            monkeypatch.setattr(time, "monotonic", partial(float, now_s))
            supervisor._check_heartbeats()

    pass_time(10, 1)
    pass_time(1000, 1000)  # in which the supervisor was frozen
    assert sent == [(100, signal.SIGABRT)]
    assert WorkerCounters(counters, 0).hangs() == 1
    pass_time(PREPARING_HANG_S - 12, 1)
    assert sent[-1] == (100, signal.SIGKILL)
    pass_time(1, 1)
    assert sent[-1] == (101, signal.SIGABRT)
    assert not [pid for pid, _ in sent if pid == 102]


class InterruptedCoordinator(RolloutCoordinator):
    """Gets SIGHUP while it works, and ends the server once the signal is handled."""

    def __init__(self) -> None:
        super().__init__({}, lambda name, path: None)
        self.is_at_work = False
        self.was_at_work: list[bool] = []

    def advance_rollout(self) -> None:
        self.is_at_work = True
        os.kill(os.getpid(), signal.SIGHUP)
        self.is_at_work = False

    def reload(self) -> None:
        self.was_at_work.append(self.is_at_work)
        os.kill(os.getpid(), signal.SIGTERM)


def wait_for_signal(index: int, channel: socket.socket) -> int:
    signal.pause()
    return 0


def test_reload_signal_does_not_interrupt_a_rollout() -> None:
    """Covers signal handlers, which run between any two instructions, even in the middle of a
    rollout."""
    coordinator = InterruptedCoordinator()
    counters = SharedCounters(1, CounterRoom(1, COLUMNS_MIN).cells)
    Supervisor(wait_for_signal, counters, 1, 0, coordinator).run()
    assert coordinator.was_at_work == [False]


class LateCoordinator(RolloutCoordinator):
    """Lets a ready worker report a failure and end while the supervisor does not wait for events.
    Ends the server then."""

    def __init__(self) -> None:
        super().__init__({"m": RolloutVersion(1, "")}, lambda name, path: None)
        self.read, self.write = os.pipe()
        self.is_ready = False
        self.ended: list[str] = []

    def advance_rollout(self) -> None:
        if self.is_ready and not self.ended:
            os.write(self.write, b"!")
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)

    def on_worker_exit(self, worker: int, how: str) -> None:
        self.ended.append(how)
        os.kill(os.getpid(), signal.SIGTERM)


def test_last_message_of_a_worker_that_has_ended_does_not_end_the_server() -> None:
    """Covers a worker that the coordinator ends for this message: its process is there no more."""
    coordinator = LateCoordinator()

    def worker_main(index: int, channel: socket.socket) -> int:
        def send(report: StartReport | WorkerStatus) -> None:
            channel.sendall(message_to_bytes(report) + b"\n")

        send(WorkerStatus({"m": NameStatus(1)}))
        channel.recv(1 << 16)  # its desired state
        send(StartReport())
        os.read(coordinator.read, 1)
        send(WorkerStatus({"m": NameStatus(1, state=LoadState.FAILED, reason="damaged")}))
        return 0

    def on_ready() -> None:
        coordinator.is_ready = True

    counters = SharedCounters(1, CounterRoom(1, COLUMNS_MIN).cells)
    Supervisor(worker_main, counters, 1, 0, coordinator, on_ready=on_ready).run()
    assert coordinator.ended == ["ended with exit code 0"]
    os.close(coordinator.read)
    os.close(coordinator.write)
