"""Tests of the supervisor: workers start together, are replaced when they end, and stop
together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.async_popen import AsyncPopen, start_python

from embedserve.metrics.metrics import cells_per_worker
from embedserve.metrics.model_metrics import COLUMNS_MIN
from embedserve.metrics.shared_counters import SharedCounters
from embedserve.processes.channel import WorkerChannel
from embedserve.processes.rollout.coordinator import RolloutCoordinator
from embedserve.processes.supervisor import Supervisor

SCRIPT = Path(__file__).parents[1] / "supervised.py"
BODY = b'{"features": {"user": [1]}}'
WAIT_S_MAX = 60
"""Seconds until a wait counts as failed.

20 did not suffice on a host with four times the load that it could carry.
"""
TIME = re.compile(r"^\S+ \S+ (?=[A-Z]+ embedserve)")
"""Matches the part of a log line before its level."""
pytestmark = pytest.mark.usefixtures("warm")


@dataclass
class Supervised:
    """A supervisor with its workers, in processes of their own."""

    process: AsyncPopen
    http_port: int
    failure: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def worker_pids(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    @property
    def socket_file(self) -> Path:
        return Path(f"{self.failure}.sock")

    async def post(self, uds: str | None = None) -> int:
        """Returns the status of one embed request over a connection of its own."""
        transport = httpx.AsyncHTTPTransport(uds=uds, verify=False)
        async with httpx.AsyncClient(timeout=WAIT_S_MAX, transport=transport) as client:
            return (await client.post(f"{self.url}/embed", content=BODY)).status_code

    async def metric(self, *names: str) -> float:
        """Returns the sum of the samples of metrics in one scrape."""
        async with httpx.AsyncClient(timeout=WAIT_S_MAX, verify=False) as client:
            text = (await client.get(f"{self.url}/metrics")).text
        families = text_string_to_metric_families(text)
        return sum(s.value for family in families for s in family.samples if s.name in names)

    async def until_metric(self, name: str, is_right: Callable[[float], bool]) -> None:
        """Scrapes until ``is_right``. A connection to a worker that was just killed may break."""
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if is_right(await self.metric(name)):
                        return
                await asyncio.sleep(0.02)

    async def until_line(self, wanted: str) -> list[str]:
        """Returns the output up to a line that begins with ``wanted``, without the times of log
        lines."""
        lines: list[str] = []
        async with asyncio.timeout(WAIT_S_MAX):
            while not lines or not lines[-1].startswith(wanted):
                line = await self.process.stdout.readline()
                assert line, f"ended after {lines}"
                lines.append(TIME.sub("", line.decode().strip()))
        return lines

    async def ended(self) -> tuple[int, str]:
        """Returns (exit status, remaining output)."""
        async with asyncio.timeout(WAIT_S_MAX):
            return await self.process.ended()


async def start(
    tmp_path: Path,
    workers: int,
    drain_s: float = 10,
    lookup_s: float = 0,
    hang_s: float = 0,
    is_warm: bool = True,
) -> Supervised:
    failure = tmp_path / "failure"
    process = await start_python(
        *(SCRIPT, workers, drain_s, lookup_s, hang_s, failure),
        is_warm=is_warm,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return Supervised(process, 0, failure)


@asynccontextmanager
async def supervised(
    tmp_path: Path,
    workers: int = 2,
    drain_s: float = 10,
    lookup_s: float = 0,
    hang_s: float = 0,
    is_warm: bool = True,
) -> AsyncIterator[Supervised]:
    """Starts a server and waits until it is ready. Kills its remaining processes at the end."""
    server = await start(tmp_path, workers, drain_s, lookup_s, hang_s, is_warm)
    try:
        server.http_port = int((await server.until_line("ready"))[-1].split()[1])
        yield server
    finally:
        if server.process.returncode is None:
            for pid in (server.process.pid, *server.worker_pids()):
                os.kill(pid, signal.SIGKILL)
        await server.process.wait()


async def test_all_workers_serve_and_stop_on_sigterm(tmp_path: Path) -> None:
    async with supervised(tmp_path, workers=3, is_warm=False) as server:
        assert len(server.worker_pids()) == 3
        assert await asyncio.gather(*(server.post() for _ in range(40))) == [200] * 40
        assert await server.metric("embedserve_workers") == 3
        await server.until_metric("embedserve_requests_total", lambda value: value >= 40)
        server.process.terminate()
        status, output = await server.ended()
    assert status == 0
    assert output.endswith("imported:\n")  # the supervisor imports no module with threads
    assert output.count("draining") == 3


async def test_none_is_answered_before_what_answered_until_then_has_ended(tmp_path: Path) -> None:
    """Checks that a caller who knows that the server is ready gets no response of the startup
    server. A request that comes meanwhile waits, and is not rejected."""
    (tmp_path / "failure.asked").touch()
    server = await start(tmp_path, workers=1)
    try:
        lines = await server.until_line("ready")
        assert lines == ["started 0", "waited", lines[-1]]
        server.http_port = int(lines[-1].split()[1])
        assert await server.post() == 200
        server.process.terminate()
        assert (await server.ended())[0] == 0
    finally:
        if server.process.returncode is None:
            server.process.kill()


async def test_workers_share_a_unix_socket_and_one_that_ends_is_missed_by_nobody(
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
        server.process.terminate()
        status, output = await server.ended()
    assert (status, "Traceback" in output) == (0, False)
    assert not server.socket_file.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_what_was_accepted_is_answered_where_all_processes_are_signalled(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Covers a terminal's SIGINT and systemd's SIGTERM, which reach the supervisor and every
    worker."""
    async with supervised(tmp_path, drain_s=60, lookup_s=1.5) as server:
        ways = (None, str(server.socket_file))
        posts = [asyncio.create_task(server.post(way)) for way in ways for _ in range(5)]
        queued, taken = "embedserve_queue_requests", "embedserve_queue_wait_seconds_count"
        async with asyncio.timeout(WAIT_S_MAX):
            while await server.metric(queued, taken) < len(posts):
                assert all(post.result() == 200 for post in posts if post.done())
                await asyncio.sleep(0.02)
        os.killpg(server.process.pid, number)
        assert await asyncio.gather(*posts) == [200] * len(posts)
        status, output = await server.ended()
    assert status == 0
    assert output.count("draining") == 2
    assert "Traceback" not in output


async def test_a_killed_worker_is_replaced_and_no_counter_goes_back(tmp_path: Path) -> None:
    async with supervised(tmp_path) as server:
        await asyncio.gather(*(server.post() for _ in range(40)))
        await server.until_metric("embedserve_requests_total", lambda value: value >= 40)
        first, second = server.worker_pids()
        await asyncio.sleep(0.6)  # longer than FLUSH_S: the other worker can read all counts
        cpu_s = await server.metric("process_cpu_seconds_total")
        server.failure.write_text("not yet")  # no replacement is ready before the next scrape
        os.kill(first, signal.SIGKILL)
        await server.until_metric("embedserve_workers", lambda workers: workers == 1)
        assert await server.metric("embedserve_requests_total") == 40
        assert await server.metric("process_cpu_seconds_total") >= cpu_s
        server.failure.unlink()
        await server.until_metric("embedserve_workers", lambda value: value >= 2)
        restarts = await server.metric("embedserve_worker_restarts_total")
        assert restarts >= 1
        pids = server.worker_pids()
        assert second in pids
        assert first not in pids
        os.kill(second, signal.SIGKILL)  # the replacement continues the counts
        await server.until_metric(
            "embedserve_worker_restarts_total", lambda value: value >= restarts + 1
        )
        await server.until_metric("embedserve_workers", lambda value: value >= 2)
        assert await server.metric("embedserve_worker_restarts_total") == restarts + 1
        assert await server.metric("embedserve_requests_total") == 40
        assert await server.post() == 200
        await server.until_metric("embedserve_requests_total", lambda value: value >= 41)
        server.process.terminate()
        status, output = await server.ended()
    assert status == 0
    assert "was ended by SIGKILL: restarted" in output


async def test_workers_that_fail_again_are_waited_for_longer(tmp_path: Path) -> None:
    async with supervised(tmp_path) as server:
        server.failure.write_text("no such thing")
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        lines = await server.until_line("ERROR embedserve.processes.supervisor: worker 0")
        assert lines[-1].endswith("was ended by SIGKILL: restarted")
        for delay in (1, 2):
            lines = await server.until_line("ERROR embedserve.processes.supervisor: worker 0")
            assert lines[-1].endswith(f"(no such thing): restarted in {delay} s")
        assert "ended with exit code 3 before it was ready" in lines[-1]
        assert await server.post() == 200  # the other worker serves meanwhile
        server.failure.unlink()
        await server.until_metric("embedserve_workers", lambda value: value >= 2)


async def test_a_worker_that_cannot_be_forked_is_tried_again(tmp_path: Path) -> None:
    full = tmp_path / "failure.full"
    async with supervised(tmp_path) as server:
        stays, victim = server.worker_pids()
        full.touch()
        os.kill(victim, signal.SIGKILL)
        lines = await server.until_line("ERROR embedserve.processes.supervisor: worker 1")
        assert lines[-1].endswith("was ended by SIGKILL: restarted")
        for delay in (1, 2):
            lines = await server.until_line("ERROR embedserve.processes.supervisor: worker 1")
            assert lines[-1].endswith(
                "worker 1 cannot be started: [Errno 11] Resource temporarily unavailable; "
                f"it is tried again in {delay} s"
            )
        assert server.worker_pids() == [stays]
        assert await server.post() == 200
        full.unlink()
        await server.until_line("INFO embedserve.processes.supervisor: worker 1 is ready")
        assert server.worker_pids()[0] == stays
        assert len(server.worker_pids()) == 2
        server.process.terminate()
        assert (await server.ended())[0] == 0


async def test_a_worker_that_keeps_ending_is_waited_for(tmp_path: Path) -> None:
    async with supervised(tmp_path) as server:
        stays, victim = server.worker_pids()
        for how in ("restarted", "restarted in 1 s", "restarted in 2 s"):
            os.kill(victim, signal.SIGBUS)
            lines = await server.until_line("ERROR embedserve.processes.supervisor: worker 1")
            assert lines[-1].endswith(f"was ended by SIGBUS (tables are cut off): {how}")
            await server.until_line("INFO embedserve.processes.supervisor: worker 1 is ready")
            (victim,) = set(server.worker_pids()) - {stays}


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGUSR1])
async def test_a_worker_that_hangs_is_replaced(tmp_path: Path, number: signal.Signals) -> None:
    async with supervised(tmp_path, hang_s=3) as server:
        hung = server.worker_pids()[1]
        os.kill(hung, number)
        lines = await server.until_line("ERROR embedserve.processes.supervisor: worker 1")
        assert f"worker 1 (process {hung}) hangs: no heartbeat for " in lines[-1]
        ended = await server.until_line("ERROR embedserve.processes.supervisor: worker 1")
        assert await asyncio.gather(*(server.post() for _ in range(20))) == [200] * 20
        ready = await server.until_line("INFO embedserve.processes.supervisor: worker 1 is ready")
        said = "\n".join([*ended, *ready])
        if number == signal.SIGUSR1:
            assert "Fatal Python error: Aborted" in said
            assert "in hang_here" in said
            assert "was ended by SIGABRT: restarted" in said
        else:
            assert "was ended by SIGKILL: restarted" in said
        assert hung not in server.worker_pids()
        assert await server.metric("embedserve_workers") == 2
        assert await server.metric("embedserve_worker_hangs_total") == 1
        assert await server.metric("embedserve_worker_restarts_total") == 1


async def test_workers_that_live_are_left_alone(tmp_path: Path) -> None:
    """Covers a supervisor that itself did not run for longer than a worker may be silent."""
    async with supervised(tmp_path, hang_s=3) as server:
        pids = server.worker_pids()
        for pid in (server.process.pid, *pids):
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(4)
        for pid in (server.process.pid, *pids):
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(4)
        assert server.worker_pids() == pids
        assert await server.metric("embedserve_worker_hangs_total") == 0


async def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
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


async def test_a_failure_before_the_first_ready_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "failure").write_text("tables are damaged")
    status, output = await (await start(tmp_path, 2)).ended()
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
        server.process.terminate()
        status, output = await server.ended()
    assert status == 0
    assert "workers are killed: they did not end in time" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_server_that_is_not_ready_yet_is_stopped(
    tmp_path: Path, number: signal.Signals
) -> None:
    server = await start(tmp_path, 2)
    await server.until_line("started")
    server.process.send_signal(number)
    status, output = await server.ended()
    assert status == 0
    assert "Traceback" not in output


class Interrupted(RolloutCoordinator):
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


def wait_for_signal(index: int, channel: WorkerChannel) -> int:
    signal.pause()
    return 0


def test_a_reload_interrupts_nothing() -> None:
    """Covers signal handlers, which run between any two instructions, even in the middle of a
    rollout."""
    coordinator = Interrupted()
    counters = SharedCounters(1, cells_per_worker(1, COLUMNS_MIN))
    Supervisor(wait_for_signal, counters, 1, 0, coordinator).run()
    assert coordinator.was_at_work == [False]
