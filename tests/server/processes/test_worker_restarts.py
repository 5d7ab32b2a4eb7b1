"""Tests of the supervisor: workers that end or hang are replaced, and the others are not."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from server.processes.supervised_server import supervised

pytestmark = pytest.mark.usefixtures("warm")


async def test_killed_worker_is_replaced_and_counters_do_not_decrease(tmp_path: Path) -> None:
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
        output = await server.stop()
    assert "was ended by SIGKILL: restarted" in output


async def test_restart_delay_grows_for_a_worker_that_fails_to_start(tmp_path: Path) -> None:
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


async def test_failed_fork_of_a_worker_is_retried(tmp_path: Path) -> None:
    full = tmp_path / "failure.full"
    async with supervised(tmp_path) as server:
        remaining, killed = server.worker_pids()
        full.touch()
        os.kill(killed, signal.SIGKILL)
        lines = await server.until_line("ERROR embedserve.processes.supervisor: worker 1")
        assert lines[-1].endswith("was ended by SIGKILL: restarted")
        for delay in (1, 2):
            lines = await server.until_line("ERROR embedserve.processes.supervisor: worker 1")
            assert lines[-1].endswith(
                "worker 1 cannot be started: [Errno 11] Resource temporarily unavailable; "
                f"it is tried again in {delay} s"
            )
        assert server.worker_pids() == [remaining]
        assert await server.post() == 200
        full.unlink()
        await server.until_line("INFO embedserve.processes.supervisor: worker 1 is ready")
        assert server.worker_pids()[0] == remaining
        assert len(server.worker_pids()) == 2
        await server.stop()


async def test_restart_delay_grows_for_a_worker_that_keeps_ending(tmp_path: Path) -> None:
    async with supervised(tmp_path) as server:
        remaining, killed = server.worker_pids()
        for how in ("restarted", "restarted in 1 s", "restarted in 2 s"):
            os.kill(killed, signal.SIGBUS)
            lines = await server.until_line("ERROR embedserve.processes.supervisor: worker 1")
            assert lines[-1].endswith(f"was ended by SIGBUS (tables are cut off): {how}")
            await server.until_line("INFO embedserve.processes.supervisor: worker 1 is ready")
            (killed,) = set(server.worker_pids()) - {remaining}


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGUSR1])
async def test_hung_worker_is_replaced(tmp_path: Path, number: signal.Signals) -> None:
    async with supervised(tmp_path, hang_s=3) as server:
        hung = server.worker_pids()[1]
        os.kill(hung, number)
        lines = await server.until_line("ERROR embedserve.processes.supervisor: worker 1")
        assert f"worker 1 (process {hung}) hangs: no heartbeat for " in lines[-1]
        ended = await server.until_line("ERROR embedserve.processes.supervisor: worker 1")
        assert await asyncio.gather(*(server.post() for _ in range(20))) == [200] * 20
        ready = await server.until_line("INFO embedserve.processes.supervisor: worker 1 is ready")
        logged = "\n".join([*ended, *ready])
        if number == signal.SIGUSR1:
            assert "Fatal Python error: Aborted" in logged
            assert "in hang_here" in logged
            assert "was ended by SIGABRT: restarted" in logged
        else:
            assert "was ended by SIGKILL: restarted" in logged
        assert hung not in server.worker_pids()
        assert await server.metric("embedserve_workers") == 2
        assert await server.metric("embedserve_worker_hangs_total") == 1
        assert await server.metric("embedserve_worker_restarts_total") == 1


async def test_workers_are_not_replaced_after_the_supervisor_was_frozen(tmp_path: Path) -> None:
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
