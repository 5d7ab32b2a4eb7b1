"""The process that a user started with --grpc-server pyvoy: starts Envoy and ends with it.

The server itself, REST and gRPC in one event loop, runs in the Python inside Envoy (pyvoy_app.py).
This process hands over what it claimed and was told, and holds one end of a pipe: when that closes,
on SIGTERM or because this process died, the server drains. Never imports torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from embedserve.config import ServeSettings
from embedserve.ports import Ports
from embedserve.pyvoy_envoy import envoy_command, envoy_environment

VARIABLE = "EMBEDSERVE_HANDED_OVER"
APP = "embedserve.pyvoy_app:app"
KILL_S = 5.0
"""After the drain's end; Envoy itself ends within a fraction of a second."""
STOPPED_EARLY = 128 + signal.SIGTERM
"""Exit status of a server that was told to stop before it was ready."""


@dataclass(frozen=True)
class HandedOver:
    """What the server in Envoy is given, as JSON in one variable of its environment.

    Attributes:
        settings: with the versions to serve named.
        host, http_port, grpc_port: as claimed.
        http_fd, grpc_fd: their listening sockets; Envoy binds the second port itself.
        stop_fd: end of a pipe that is closed when the server has to stop.
        folder: of Envoy's admin socket.
        start_s: when the user's process began, of time.perf_counter(), which all processes share.
    """

    settings: ServeSettings
    host: str
    http_port: int
    grpc_port: int
    http_fd: int
    grpc_fd: int
    stop_fd: int
    folder: str
    start_s: float

    def ports(self) -> Ports:
        """The claimed ports, which now belong to this process."""
        sockets = (socket.socket(fileno=fd) for fd in (self.http_fd, self.grpc_fd))
        return Ports(self.host, self.http_port, self.grpc_port, *sockets)


def read_handed_over() -> HandedOver:
    return msgspec.json.decode(os.environ[VARIABLE], type=HandedOver)


class _StopError(Exception):
    """SIGTERM or SIGINT came."""


class _Signals:
    """Takes SIGTERM and SIGINT, the first of which interrupts what is done after arm()."""

    def __init__(self) -> None:
        self._is_armed = False
        self._has_come = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True
        self._check()

    def arm(self) -> None:
        """Raises _StopError, now or later."""
        self._is_armed = True
        self._check()

    def _check(self) -> None:
        if self._is_armed and self._has_come:
            self._is_armed = False
            raise _StopError


def run_envoy(settings: ServeSettings, ports: Ports, start_s: float, app: str = APP) -> int:
    """The exit status of the server, which drains on SIGTERM and SIGINT; closes ``ports``.

    Below 0 it is the number of the signal that ended the server.
    """
    folder = Path(tempfile.mkdtemp(prefix="embedserve-"))
    read_fd, write_fd = os.pipe()
    given = HandedOver(
        settings=settings,
        host=ports.host,
        http_port=ports.http,
        grpc_port=ports.grpc,
        http_fd=ports.http_socket.fileno(),
        grpc_fd=ports.grpc_socket.fileno(),
        stop_fd=read_fd,
        folder=str(folder),
        start_s=start_s,
    )
    try:
        with _handled_by(_Signals()) as signals:
            process = _start(given, ports, app)
            os.close(read_fd)
            ports.close()
            try:
                signals.arm()
                return process.wait()
            except _StopError:
                os.close(write_fd)
                write_fd = -1
                return _wait_or_kill(process, settings.drain_s + KILL_S)
    finally:
        if write_fd >= 0:
            os.close(write_fd)
        shutil.rmtree(folder, ignore_errors=True)


def _start(given: HandedOver, ports: Ports, app: str) -> subprocess.Popen[bytes]:
    address = ports.grpc_socket.getsockname()[0]
    process = subprocess.Popen(
        envoy_command(app, address, ports.grpc, Path(given.folder)),
        env=envoy_environment() | {VARIABLE: msgspec.json.encode(given).decode()},
        pass_fds=(given.http_fd, given.grpc_fd, given.stop_fd),
        stdin=subprocess.DEVNULL,
        # Envoy takes SIGINT and SIGTERM as orders to drop all calls; a terminal sends them to all.
        start_new_session=True,
    )
    # A call goes from thread to thread. As batch jobs, which the threads to come will be as well,
    # they do not interrupt one another for each of them: half as many calls a second again.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(process.pid, os.SCHED_BATCH, os.sched_param(0))
    return process


def _wait_or_kill(process: subprocess.Popen[bytes], seconds: float) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@contextlib.contextmanager
def _handled_by(signals: _Signals) -> Iterator[_Signals]:
    """Within, SIGTERM and SIGINT go to ``signals``; for the main thread only."""
    before = {one: signal.signal(one, signals) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
