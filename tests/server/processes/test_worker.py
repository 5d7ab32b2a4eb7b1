"""Tests of a worker: it listens once it serves the versions that the other workers serve."""

import asyncio
import selectors
import socket
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import uvloop
from msgspec import DecodeError
from server.fake_engine import FakeEngine
from server.pipelines import make_pipeline
from server.waiting import WAIT_S_MAX, until

from embedserve.config import ServeSettings
from embedserve.metrics.metrics import CounterRoom
from embedserve.metrics.model_metrics import COLUMNS_MIN
from embedserve.metrics.shared_counters import SharedCounters, WorkerCounters
from embedserve.processes.channel import SupervisorChannel
from embedserve.processes.rollout.messages import (
    Desired,
    Report,
    StartReport,
    WorkerStatus,
    message_to_bytes,
    report_from_bytes,
)
from embedserve.processes.rollout.version_manager import VersionManager
from embedserve.processes.serve import _worker_main
from embedserve.processes.startup.ports import Ports, claim_ports
from embedserve.processes.worker import report_failure, run_worker

LISTENS = StartReport()


class SupervisedWorker:
    """A worker in this process, and the supervisor's end of its channel."""

    def __init__(self, executor: ThreadPoolExecutor, ports: Ports) -> None:
        self._ours, supervisors = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self.channel = SupervisorChannel(supervisors, self._selector, lambda: None)
        self.manager, work = made(self._ours, executor, ports)
        self.running = asyncio.create_task(work)

    def send(self, desired: Desired) -> None:
        self.channel.send(message_to_bytes(desired))

    async def receive(self) -> list[Report | StartReport]:
        """Returns the reports that the worker sends within 0.2 s."""
        await asyncio.sleep(0.2)
        return self._received()

    async def until_reported(self, report: StartReport) -> None:
        await until(lambda: report in self._received())

    def _received(self) -> list[Report | StartReport]:
        return [report_from_bytes(line) for line in self.channel.receive() or ()]

    async def end(self) -> None:
        """Closes the supervisor's end, as if the supervisor had ended."""
        self.channel.end()
        self._selector.close()
        async with asyncio.timeout(WAIT_S_MAX):
            await self.running
        self._ours.close()


def made(
    channel: socket.socket, executor: ThreadPoolExecutor, ports: Ports
) -> tuple[VersionManager, Coroutine[Any, Any, None]]:
    """Returns the version manager of a worker, and its coroutine."""
    counters = WorkerCounters(SharedCounters(1, CounterRoom(1, COLUMNS_MIN).cells), 0)
    pipeline = make_pipeline(FakeEngine(), executor=executor, counters=counters)
    manager = VersionManager(pipeline, {}, executor, 1, None, None)  # type: ignore[arg-type]
    settings = ServeSettings(store="", workers=2, follow="none")
    work = run_worker(pipeline, manager, settings, ports, lambda: None, counters, channel)
    return manager, work


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


async def test_error_of_a_message_does_not_end_the_channel(executor: ThreadPoolExecutor) -> None:
    """Checks that later messages arrive."""
    faults = list[object]()
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: faults.append(context["exception"])
    )
    ports = claim_ports("127.0.0.1", 0, 0).share()
    worker = SupervisedWorker(executor, ports)
    worker.send(Desired())
    worker.channel.send(b"no message")
    worker.send(Desired(may_listen=True))
    await worker.until_reported(LISTENS)
    assert [type(fault) for fault in faults] == [DecodeError]
    await worker.end()
    ports.close()


def test_worker_stopped_before_it_listens_ends_and_drops_reports(
    executor: ThreadPoolExecutor,
) -> None:
    """Runs on uvloop, whose closed transports raise an error."""

    async def report_after_end() -> None:
        ports = claim_ports("127.0.0.1", 0, 0).share()
        worker = SupervisedWorker(executor, ports)
        worker.send(Desired())
        assert LISTENS not in await worker.receive()
        await worker.end()
        worker.manager.report(WorkerStatus())
        ports.close()

    uvloop.run(report_after_end())


def test_failure_to_load_a_library_is_reported_with_the_loaders_reason() -> None:
    """torch's own message names the library alone."""
    failed = OSError("Could not load this library: fbgemm.so")
    failed.__cause__ = OSError("fbgemm.so: wrong ELF class")
    ours, supervisors = socket.socketpair()
    with ours, supervisors:
        report_failure(ours, failed)
        line = supervisors.recv(1000)
    reason = "fbgemm.so: wrong ELF class"
    assert report_from_bytes(line) == StartReport(reason)


def test_lack_of_memory_in_a_worker_is_reported() -> None:
    def take() -> NoReturn:
        raise MemoryError

    counters = SharedCounters(1, CounterRoom(1, COLUMNS_MIN).cells)
    ours, supervisors = socket.socketpair()
    with ours, supervisors:
        fakes: Any = SimpleNamespace(take=take)
        assert _worker_main(ServeSettings(""), {}, fakes, fakes, 0, counters, fakes, 0, ours) == 1
        line = supervisors.recv(1000)
    assert report_from_bytes(line) == StartReport("no memory is left")


def test_failure_is_reported_once_the_event_loop_has_ended(executor: ThreadPoolExecutor) -> None:
    def bind() -> NoReturn:
        raise OSError("in use")

    ours, supervisors = socket.socketpair()
    with ours, supervisors:
        supervisors.send(message_to_bytes(Desired(may_listen=True)) + b"\n")
        with pytest.raises(OSError, match="in use") as failed:
            uvloop.run(made(ours, executor, cast("Ports", SimpleNamespace(bind=bind)))[1])
        report_failure(ours, failed.value)
        *_, line = supervisors.recv(1000).splitlines()
    assert report_from_bytes(line) == StartReport("in use")
