"""One worker of a server with several workers: its channel to the supervisor, and how it serves.

A worker listens once it is warm and the supervisor permits it. It drains on SIGTERM, or when the
supervisor is gone. Workers share nothing with each other but their counters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable

from embedserve.config import ServeSettings
from embedserve.metrics.metrics import Metrics
from embedserve.metrics.shared_counters import WorkerCounters
from embedserve.pipeline import RequestPipeline
from embedserve.processes.admin_service import AdminService
from embedserve.processes.ports import SharedPorts
from embedserve.processes.rollout_agent import RolloutAgent, SupervisorController
from embedserve.processes.rollout_messages import (
    FAILED,
    MESSAGE_BYTES_MAX,
    WorkerChannel,
    WorkerMessage,
)
from embedserve.processes.server import run_server, stop_or_end
from embedserve.processes.store_watcher import begin_shares
from embedserve.processes.version_manager import VersionManager

logger = logging.getLogger(__name__)

FLUSH_S = 0.5
"""Seconds between two flushes of this worker's counters, which are also its heartbeats. Other
workers report its counts at most this late."""


def wait_for_start(channel: socket.socket) -> bool:
    """Reports that this worker is warm and waits for permission to listen. Returns False if the
    worker is to exit."""
    channel.send(WorkerMessage.WARM.value)
    return channel.recv(MESSAGE_BYTES_MAX) == WorkerMessage.GO.value


def report_failure(channel: socket.socket, error: Exception) -> None:
    """Reports to the supervisor why this worker cannot serve."""
    channel.send((FAILED + str(error).encode())[:MESSAGE_BYTES_MAX])


async def run_worker(
    pipeline: RequestPipeline,
    settings: ServeSettings,
    ports: SharedPorts,
    counters: WorkerCounters,
    channel: socket.socket,
    announce: Callable[[], None],
    version_manager: VersionManager | None = None,
) -> None:
    """Serves until SIGTERM, or until the supervisor is gone, then drains.

    Args:
        announce: called if this worker is the one that announces that the server is ready.
        version_manager: manager of the served versions; it switches versions on messages of the
            supervisor.

    Raises:
        OSError: another process has taken a port of this server.
    """
    loop = asyncio.get_running_loop()
    alone, stop = asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop_or_end, stop, signal.SIGTERM)
    channel.setblocking(False)
    sending = WorkerChannel(channel)
    moving = operator = None
    if version_manager is not None:
        moving = RolloutAgent(settings, version_manager, sending, stop)
        operator = AdminService(settings, version_manager, SupervisorController(sending))
        await begin_shares(settings, version_manager)

    def hear() -> None:
        try:
            message = channel.recv(MESSAGE_BYTES_MAX)
        except ConnectionResetError:
            message = b""
        if message == WorkerMessage.START_ACCEPTING.value:
            alone.set()
        elif message == WorkerMessage.ANNOUNCE.value:
            announce()
        elif message and moving is not None:
            moving.on_message(message)
        elif not message:
            loop.remove_reader(channel)
            logger.error("the supervisor is gone: this worker stops, too")
            stop.set()

    loop.add_reader(channel, hear)
    async with heartbeat(pipeline.metrics, counters):
        bound = ports.bind()
        bound.listen(with_grpc=settings.grpc_server == "native")
        sending.send(WorkerMessage.READY.value)
        await _either(alone, stop)
        await run_server(stop, pipeline, settings, bound, lambda: None, operator)


async def _either(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()


@contextlib.asynccontextmanager
async def heartbeat(metrics: Metrics, counters: WorkerCounters) -> AsyncIterator[None]:
    """Sends heartbeats to the supervisor, and flushes this worker's counters for the other workers,
    every FLUSH_S within its block. Flushes the counters once more at the end."""

    async def flush() -> None:
        while True:
            counters.beat()
            metrics.flush()
            await asyncio.sleep(FLUSH_S)

    flushing = asyncio.create_task(flush())
    try:
        yield
    finally:
        flushing.cancel()
        metrics.flush()
