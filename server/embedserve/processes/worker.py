"""One worker of a server with several: its channel to the supervisor, and how it serves.

Listens when it is warm and the supervisor lets it, drains on SIGTERM and when the supervisor is
gone. Other workers are known to it only by what they count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable

from embedserve.config import ServeSettings
from embedserve.exchange import Exchange
from embedserve.metrics.metrics import Metrics
from embedserve.metrics.slots import Slot
from embedserve.processes.following import begin_shares
from embedserve.processes.messages import FAILED, MESSAGE_BYTES_MAX, WorkerChannel, WorkerMessage
from embedserve.processes.moving_worker import MovingWorker, TellingSupervisor
from embedserve.processes.operator import Operator
from embedserve.processes.ports import SharedPorts
from embedserve.processes.rollout import Rollout
from embedserve.processes.server import serve_until, stop_or_end

logger = logging.getLogger(__name__)

FLUSH_S = 0.5
"""How old at most what the other workers show of this one's counts is; and between two signs of
life."""


def wait_to_go(channel: socket.socket) -> bool:
    """Tells that this worker is warm; returns when it may listen, False if it is to end."""
    channel.send(WorkerMessage.WARM.value)
    return channel.recv(MESSAGE_BYTES_MAX) == WorkerMessage.GO.value


def tell_failure(channel: socket.socket, error: Exception) -> None:
    """Tells why this worker cannot serve."""
    channel.send((FAILED + str(error).encode())[:MESSAGE_BYTES_MAX])


async def run_worker(
    exchange: Exchange,
    settings: ServeSettings,
    ports: SharedPorts,
    slot: Slot,
    channel: socket.socket,
    announce: Callable[[], None],
    rollout: Rollout | None = None,
) -> None:
    """Serves until SIGTERM, or until the supervisor is gone, then drains.

    Args:
        announce: called if this worker is the one to tell that the server is ready.
        rollout: moves to other versions as the supervisor says.

    Raises:
        OSError: a port was taken from us.
    """
    loop = asyncio.get_running_loop()
    alone, stop = asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop_or_end, stop, signal.SIGTERM)
    channel.setblocking(False)
    sending = WorkerChannel(channel)
    moving = operator = None
    if rollout is not None:
        moving = MovingWorker(settings, rollout, sending, stop)
        operator = Operator(settings, rollout, TellingSupervisor(sending))
        await begin_shares(settings, rollout)

    def hear() -> None:
        try:
            message = channel.recv(MESSAGE_BYTES_MAX)
        except ConnectionResetError:
            message = b""
        if message == WorkerMessage.ALONE.value:
            alone.set()
        elif message == WorkerMessage.ANNOUNCE.value:
            announce()
        elif message and moving is not None:
            moving.hear(message)
        elif not message:
            loop.remove_reader(channel)
            logger.error("the supervisor is gone: this worker stops, too")
            stop.set()

    loop.add_reader(channel, hear)
    async with heard_regularly(exchange.metrics, slot):
        bound = ports.bind()
        bound.listen(with_grpc=settings.grpc_server == "native")
        sending.send(WorkerMessage.READY.value)
        await _either(alone, stop)
        await serve_until(stop, exchange, settings, bound, lambda: None, operator)


async def _either(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()


@contextlib.asynccontextmanager
async def heard_regularly(metrics: Metrics, slot: Slot) -> AsyncIterator[None]:
    """Within, the supervisor sees that this worker lives, and other workers see soon what it
    counts; and at the end all of it."""

    async def flush() -> None:
        while True:
            slot.beat()
            metrics.flush()
            await asyncio.sleep(FLUSH_S)

    flushing = asyncio.create_task(flush())
    try:
        yield
    finally:
        flushing.cancel()
        metrics.flush()
