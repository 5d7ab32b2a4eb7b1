"""One process of `embedserve cluster`, such as an `embedserve serve`: it ends with the process that
started it, and is started again after a time."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import IO

from embedserve.config import Limits, ServeSettings, bracketed
from embedserve.processes.forked import Restarts, end_with_parent
from embedserve.processes.startup.ports import claim_ports
from embedserve_store.terminal.console import say

HOST = "127.0.0.1"
SHARD_PORTS = range(20_000, 32_000)
"""Ports of shards: below those that Linux gives to outgoing connections, 32768 and above."""
REPORT_BYTES = 4096


class Child:
    """A process of the cluster, which is started again when it ends.

    Attributes:
        address: HOST:PORT of its gRPC port since the last start; "" if it is no shard.
        was_ready: whether it was ready once, since the cluster was started.
        restarts: when it may start.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        shard_host: str = "",
        is_piped: bool = False,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """
        Args:
            name: name in log lines.
            arguments: command line without the ports of a shard.
            shard_host: for a shard, the address of its ports, which are new at each start.
            is_piped: whether ``start`` returns its stderr, so that its lines get a prefix.
            environment: its environment, before settings of `serve` are removed.
        """
        self.name = name
        self.address = ""
        self.was_ready = False
        self.restarts = Restarts()
        self.process: subprocess.Popen[bytes] | None = None
        self._arguments, self._shard_host = arguments, shard_host
        self._is_piped, self._environment = is_piped, environment
        self._ready_s: float | None = None
        self._claimed: list[socket.socket] = []  # on the ports of the process

    def start(self, notify_address: str) -> IO[bytes] | None:
        """Starts the process. Returns its stderr; None if that is this process's own.

        Args:
            notify_address: path of the socket that it reports to.

        Raises:
            OSError: there is no process, memory, descriptor or port left.
        """
        self._ready_s = None
        arguments = list(self._arguments)
        host = self._shard_host
        if host:
            self._release_ports()
            self._claimed = [_claim_free_port(host), _claim_free_port(host)]
            http_port, grpc_port = (claimed.getsockname()[1] for claimed in self._claimed)
            self.address = f"{bracketed(host)}:{grpc_port}"
            arguments += ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
        parent = os.getpid()
        self.process = subprocess.Popen(
            arguments,
            env=_child_environment(self._environment) | {"NOTIFY_SOCKET": notify_address},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if host else None,
            stderr=subprocess.PIPE if self._is_piped else None,
            process_group=0,  # Ctrl-C reaches this process alone, which stops the router first
            preexec_fn=lambda: end_with_parent(parent),
        )
        if host:
            url = f"http://{bracketed(host)}:{http_port}"
            report(f"{self.name} starts as process {self.process.pid}, {url}")
        return self.process.stderr

    def receive(self, sock: socket.socket, _: object) -> None:
        """Receives a report from the socket that the process reports to."""
        if b"READY=1" in sock.recv(REPORT_BYTES):
            self.on_ready(time.monotonic())

    def on_ready(self, now_s: float) -> None:
        self._ready_s, self.was_ready = now_s, True

    def on_end(self, now_s: float) -> float:
        """Sets the time of the next start. Returns the seconds until then."""
        self.process = None
        self._release_ports()
        well_s = 0.0 if self._ready_s is None else now_s - self._ready_s
        return self.restarts.schedule(now_s, well_s, was_ready=self._ready_s is not None)

    def _release_ports(self) -> None:
        for claimed in self._claimed:
            claimed.close()
        self._claimed.clear()

    def signal(self, number: signal.Signals, *, only_ready: bool = False) -> None:
        """Sends a signal to the process, if there is one."""
        if self.process is not None and not (only_ready and self._ready_s is None):
            self.process.send_signal(number)


@contextlib.contextmanager
def held_ports(host: str, http_port: int, grpc_port: int) -> Iterator[None]:
    """Holds the ports of a process that starts later or again, so that no shard draws them.

    Raises:
        OSError: a port is in use.
    """
    held = claim_ports(host, http_port, grpc_port).share()
    try:
        for sock in held.sockets:
            _let_bind(sock)
        yield
    finally:
        held.close()


def report(line: str) -> None:
    """Prints a line of the cluster. It is lost if the disk is full, and the cluster runs on."""
    with contextlib.suppress(OSError):
        say(line)


def _child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without settings of `serve`, which are not for all children."""
    names = [one.name for kind in (ServeSettings, Limits) for one in fields(kind)]
    settings = {f"EMBEDSERVE_{name.upper()}" for name in (*names, "config")}
    return {name: value for name, value in environment.items() if name not in settings}


def _claim_free_port(host: str) -> socket.socket:
    """Returns a socket that is bound to a port of ``host``. Until it is closed, other clusters draw
    another port, also before the process listens on this one. Raises OSError if ``host`` is no
    address of this host."""
    while True:
        claimed = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            claimed.bind((host, random.choice(SHARD_PORTS)))
        except OSError as error:
            claimed.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise OSError(error.errno, f"cannot listen on {host}: {error.strerror}") from error
        _let_bind(claimed)
        return claimed


def _let_bind(claimed: socket.socket) -> None:
    """Lets `serve`, which sets the option, too, bind the port of ``claimed`` and listen."""
    claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
