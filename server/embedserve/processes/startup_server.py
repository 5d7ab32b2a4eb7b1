"""Answers while the models load, on all ports but that of gRPC: the server lives, and is not ready.

A process of its own, with the wire and no model: what imports torch and restores models keeps the
interpreter's lock for seconds, in which a probe would not be answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NoReturn

from embedserve.config import ServeSettings
from embedserve.errors import LOADING
from embedserve.processes.ports import Ports, SharedPorts

END_S_MAX = 2.0
"""Before a front that does not end is killed."""
DRAIN_S = 0.5
"""Of what it has under way."""


@contextlib.contextmanager
def serve_health_while_loading(
    settings: ServeSettings, ports: Ports | SharedPorts
) -> Iterator[Callable[[], None]]:
    """Within, until what it gives is called, a process answers on ``ports`` but gRPC's. To be
    entered before this process has threads."""
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        ours.close()
        _run_child(settings, ports, theirs)
    theirs.close()
    is_there = True

    def end() -> None:
        nonlocal is_there
        if is_there:
            is_there = False
            ours.shutdown(socket.SHUT_RDWR)  # workers have this end, too
            ours.close()
            _reap(pid)

    try:
        yield end
    finally:
        end()


def _reap(pid: int) -> None:
    """Waits for the end of a child, which it is told of already."""
    watched = os.pidfd_open(pid)
    try:
        if not select.select([watched], [], [], END_S_MAX)[0]:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    finally:
        os.close(watched)


def _run_child(
    settings: ServeSettings, ports: Ports | SharedPorts, channel: socket.socket
) -> NoReturn:
    """Answers in the process that was forked for it, and ends that process."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server hears it, too, and ends this one
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        logging.getLogger("embedserve").setLevel(logging.ERROR)  # it is not the server that drains
        import uvloop

        uvloop.run(_answer(settings, ports, channel))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


async def _answer(
    settings: ServeSettings, ports: Ports | SharedPorts, channel: socket.socket
) -> None:
    """Until the other end of ``channel`` is closed or its process has ended."""
    from embedserve.processes import server

    stop = asyncio.Event()
    channel.setblocking(False)
    asyncio.get_running_loop().add_reader(channel, stop.set)
    of_front = replace(settings, drain_s=DRAIN_S, grpc_server="native", otlp_endpoint="")
    with ThreadPoolExecutor(1) as executor:
        pipeline = server.build_pipeline({}, of_front, executor)
        pipeline.models.not_ready = LOADING
        here = ports.bind() if isinstance(ports, SharedPorts) else ports
        await server.run_server(stop, pipeline, of_front, here.without_grpc(), lambda: None)
