"""Tests of a worker: it listens once it serves the versions that the other workers serve."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

from server.fake_engine import FakeEngine
from server.pipelines import make_pipeline
from server.waiting import WAIT_S_MAX, until

from embedserve.config import ServeSettings
from embedserve.metrics.metrics import cells_per_worker
from embedserve.metrics.model_metrics import COLUMNS_MIN
from embedserve.metrics.shared_counters import SharedCounters, WorkerCounters
from embedserve.processes.channel import LineSocket, WorkerChannel
from embedserve.processes.rollout.messages import (
    Desired,
    Report,
    StartReport,
    WorkerStage,
    desired_to_bytes,
    report_from_bytes,
)
from embedserve.processes.rollout.version_manager import VersionManager
from embedserve.processes.startup.ports import Ports, claim_ports
from embedserve.processes.worker import run_worker

LISTENS = StartReport(WorkerStage.LISTENING)


class SupervisedWorker:
    """A worker in this process, and the supervisor's end of its channel."""

    def __init__(self, executor: ThreadPoolExecutor, ports: Ports) -> None:
        self._ours, self._supervisors = socket.socketpair()
        self._supervisors.setblocking(False)
        self._lines = LineSocket(self._supervisors)
        counters = WorkerCounters(SharedCounters(1, cells_per_worker(1, COLUMNS_MIN)), 0)
        pipeline = make_pipeline(FakeEngine(), executor=executor, counters=counters)
        manager = VersionManager(pipeline, {}, {}, None, None, None)  # type: ignore[arg-type]
        channel = WorkerChannel(self._ours)
        settings = ServeSettings(store="", workers=2, follow="none")
        self.running = asyncio.create_task(
            run_worker(pipeline, manager, settings, ports, lambda: None, counters, channel)
        )

    def send(self, desired: Desired) -> None:
        self._lines.queue(desired_to_bytes(desired))
        self._lines.flush()

    async def receive(self) -> list[Report | StartReport]:
        """Returns the reports that the worker sends within 0.2 s."""
        await asyncio.sleep(0.2)
        return self._received()

    async def until_reported(self, report: StartReport) -> None:
        await until(lambda: report in self._received())

    def _received(self) -> list[Report | StartReport]:
        return [report_from_bytes(line) for line in self._lines.receive() or ()]

    async def end(self) -> None:
        """Closes the supervisor's end, as if the supervisor had ended."""
        self._supervisors.close()
        async with asyncio.timeout(WAIT_S_MAX):
            await self.running
        self._ours.close()


def accepts(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


async def test_worker_listens_only_once_the_supervisor_allows_it(
    executor: ThreadPoolExecutor,
) -> None:
    ports = claim_ports("127.0.0.1", 0, 0).share()
    worker = SupervisedWorker(executor, ports)
    worker.send(Desired())
    assert LISTENS not in await worker.receive()
    assert not accepts(ports.http)
    worker.send(Desired(may_listen=True))
    await worker.until_reported(LISTENS)
    assert accepts(ports.http)
    await worker.end()
    ports.close()


async def test_worker_ends_if_stopped_before_it_listens(executor: ThreadPoolExecutor) -> None:
    ports = claim_ports("127.0.0.1", 0, 0).share()
    worker = SupervisedWorker(executor, ports)
    worker.send(Desired())
    assert LISTENS not in await worker.receive()
    await worker.end()
    ports.close()
