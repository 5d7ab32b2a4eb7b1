"""Serves health checks and metrics while the models load, on all ports except gRPC: the server is
live, not ready.

The startup server is a separate process with the wire and no model. The process that imports torch
and restores models holds the GIL for seconds, in which it could not respond to a probe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from embedserve.config import ServeSettings
from embedserve.errors import LOADING
from embedserve.processes.forked import describe_exit, fork, poll_exit_code
from embedserve.processes.startup.ports import Ports

logger = logging.getLogger(__name__)

END_S_MAX = 2.0
"""Seconds that the startup server may take to exit before it is killed."""
DRAIN_S = 0.5
"""Seconds for which the startup server drains its requests in flight."""


@contextlib.contextmanager
def serve_health_while_loading(
    settings: ServeSettings, ports: Ports
) -> Iterator[Callable[[], None]]:
    """Runs a startup server on ``ports`` except gRPC, in a child process, until the yielded
    function is called or the block ends. Must be entered before this process has threads."""
    pid, ours = fork(partial(_run_child, settings, ports), lambda: None)
    is_there = True

    def end() -> None:
        nonlocal is_there
        if is_there:
            is_there = False
            status = poll_exit_code(pid)
            ours.shutdown(socket.SHUT_RDWR)  # not only close: forked workers have this end, too
            ours.close()
            if status is None:
                _reap(pid)
            elif status != -signal.SIGTERM:  # which may have been for the whole process group
                logger.error(
                    "health checks failed while the models loaded: the startup server %s",
                    describe_exit(status),
                )

    try:
        yield end
    finally:
        end()


def _reap(pid: int) -> None:
    """Waits for a child whose channel has been shut down. Kills it after END_S_MAX."""
    watched = os.pidfd_open(pid)
    try:
        if not select.select([watched], [], [], END_S_MAX)[0]:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    finally:
        os.close(watched)


def _run_child(settings: ServeSettings, ports: Ports, channel: socket.socket) -> int:
    """Serves in the forked process; returns its exit code."""
    logging.getLogger("embedserve").setLevel(logging.ERROR)  # hides its drain messages
    import uvloop

    uvloop.run(_serve(settings, ports, channel))
    return 0


async def _serve(settings: ServeSettings, ports: Ports, channel: socket.socket) -> None:
    """Serves until the other end of ``channel`` is closed or its process has ended."""
    from embedserve.processes import server

    stop = asyncio.Event()
    channel.setblocking(False)
    asyncio.get_running_loop().add_reader(channel, stop.set)
    own_settings = replace(settings, drain_s=DRAIN_S, grpc_server="native", otlp_endpoint="")
    pipeline = server.build_pipeline((), own_settings)
    pipeline.models.not_ready = LOADING
    here = replace(ports.bind() if ports.are_shared else ports, grpc_socket=None)
    await server.run_server(stop, pipeline, own_settings, here, lambda: None)
