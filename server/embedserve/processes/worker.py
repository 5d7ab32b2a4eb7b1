"""One worker of a server with several workers: its channel to the supervisor, and how it serves.

A worker listens once it serves what the other workers serve. It drains on SIGTERM, or when the
supervisor is gone. Workers share nothing with each other but their counters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from functools import cache

from embedserve.config import ServeSettings
from embedserve.metrics.metrics import Metrics
from embedserve.metrics.shared_counters import WorkerCounters
from embedserve.periodic import repeat
from embedserve.pipeline import RequestPipeline
from embedserve.processes.channel import deliver, messages
from embedserve.processes.rollout.agent import RolloutAgent
from embedserve.processes.rollout.messages import (
    Report,
    StartReport,
    desired_from_bytes,
    message_to_bytes,
)
from embedserve.processes.rollout.store_watcher import apply_initial_alias_settings
from embedserve.processes.rollout.version_manager import VersionManager
from embedserve.processes.server import run_server
from embedserve.processes.startup.ports import Ports
from embedserve_store.errors import described

logger = logging.getLogger(__name__)

FLUSH_S = 0.5
"""Seconds between two flushes of this worker's counters, which are also its heartbeats. Other
workers report its counts at most this late."""
MESSAGE_BYTES_MAX = 1 << 30
"""Bytes of a message of the supervisor, which has some hundred for each served name."""


def report_failure(channel: socket.socket, error: Exception) -> None:
    """Reports to the supervisor why this worker cannot serve."""
    with contextlib.suppress(OSError):  # the supervisor is gone
        channel.sendall(_line(StartReport(described(error))))


def _line(report: Report | StartReport) -> bytes:
    return message_to_bytes(report) + b"\n"


async def run_worker(
    pipeline: RequestPipeline,
    version_manager: VersionManager,
    settings: ServeSettings,
    ports: Ports,
    log_ready: Callable[[], None],
    counters: WorkerCounters,
    channel: socket.socket,
) -> None:
    """Waits until the supervisor sends what to serve: at the first start, once all workers are
    warm. Serves until SIGTERM, or until the supervisor is gone, then drains.

    Args:
        version_manager: manager of the served versions; it reconciles them with the desired state
            of the supervisor.
        log_ready: called once the whole server is ready, if this worker is the one that logs it.

    Raises:
        OSError: another process has taken a port of this server.
    """
    # A copy, which is closed at the end: report_failure may write to the channel then.
    reader, writer = await asyncio.open_unix_connection(sock=channel.dup(), limit=MESSAGE_BYTES_MAX)

    def send(report: Report | StartReport) -> None:
        if not writer.is_closing():  # else the supervisor is gone, and this worker drains
            writer.write(_line(report))

    with contextlib.closing(writer):
        send(version_manager.status())
        received = messages(reader)
        if not (first := await anext(received, b"")):  # the supervisor is gone
            return
        may_listen, may_accept, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
        log_ready_once = cache(log_ready)
        # The supervisor may not be the only sender: systemd and Ctrl-C signal the whole process
        # group. At a second signal of its own the supervisor kills the workers.
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        await version_manager.start()
        agent = RolloutAgent(settings, version_manager, send, stop)
        await apply_initial_alias_settings(settings, version_manager)

        def on_message(message: bytes) -> None:
            desired = desired_from_bytes(message)
            agent.apply(desired)
            if desired.may_listen:
                may_listen.set()
            if desired.may_accept:
                may_accept.set()
            if desired.logs_ready:
                log_ready_once()

        async def follow() -> None:
            loop.call_soon(on_message, first)
            await deliver(received, on_message)
            logger.error("the supervisor is gone: this worker stops, too")
            stop.set()

        following = asyncio.create_task(follow())
        async with heartbeat(pipeline.metrics, counters):
            await _either(may_listen, stop)
            if may_listen.is_set():
                bound = ports.bind()
                bound.listen(with_grpc=settings.grpc_server == "native")
                send(StartReport())
                await _either(may_accept, stop)
                await run_server(stop, pipeline, settings, bound, lambda: None, agent.admin)
        following.cancel()


async def _either(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()


@contextlib.asynccontextmanager
async def heartbeat(metrics: Metrics, counters: WorkerCounters) -> AsyncIterator[None]:
    """Sends heartbeats to the supervisor, and flushes this worker's counters for the other workers,
    every FLUSH_S within its block. Flushes the counters once more at the end."""

    def flush() -> None:
        counters.beat()
        metrics.flush()

    flush()
    flushing = asyncio.create_task(repeat(FLUSH_S, flush))
    try:
        yield
    finally:
        flushing.cancel()
        metrics.flush()
