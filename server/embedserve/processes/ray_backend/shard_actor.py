"""The actor of one shard, in a worker process of Ray: it runs `embedserve serve --part` as its
child.

Ray starts an actor again whose process ends. It does not see the child, so the process ends when
the child does, and the child when the process does.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from embedserve.processes.cluster_child import Child
from embedserve.processes.forked import describe_exit
from embedserve_store.terminal.console import say

LINGER_S = 5.0
"""Seconds that the process of a shard that was never ready remains: its exit code is read in them,
and a shard that cannot start takes the CPU at most once in them."""


@dataclass(frozen=True)
class ShardState:
    """State of a shard, as its actor returns it.

    Attributes:
        address: HOST:PORT of its gRPC port; "" before it was started.
        is_ready: whether it was ready since its start.
        exit_code: set once it has ended without being ready, or because it was stopped.
    """

    address: str
    is_ready: bool
    exit_code: int | None


class ShardActor:
    """Starts the shard when Ray constructs it, as Ray calls nothing else after a restart."""

    def __init__(
        self, label: str, arguments: Sequence[str], host: str, environment: Mapping[str, str]
    ) -> None:
        """
        Args:
            label: name of the shard in log lines.
            arguments: arguments of Python that run the shard, without ports and host.
            host: address that the shard listens on.
            environment: environment of the shard, before settings of `serve` are removed.
        """
        self._label = label
        command = [sys.executable, *arguments, "--host", host]
        self._child = Child(label, command, shard_host=host, environment=environment)
        self._exit_code: int | None = None
        self._is_stopping = False
        threading.Thread(target=self._run, name="shard", daemon=True).start()

    def __repr__(self) -> str:
        """Returns the prefix of the shard's lines in the output of the command."""
        return self._label

    # Called by other processes, over Ray

    def state(self) -> ShardState:
        return ShardState(self._child.address, self._child.was_ready, self._exit_code)

    def poll_store(self) -> None:
        """Makes the shard look for new versions."""
        self._child.signal(signal.SIGHUP, only_ready=True)

    def stop(self) -> None:
        """Begins to stop the shard. Once it has ended, the state has its exit code."""
        self._is_stopping = True
        self._end_child()

    # In a thread of its own: the kernel ends the child with the thread that started it.

    def _run(self) -> None:
        try:
            reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            reports.bind("")  # to a free abstract name, which leaves no file behind
            threading.Thread(target=self._wait_until_ready, args=(reports,), daemon=True).start()
            self._child.start(f"@{reports.getsockname()[1:].decode()}")
            assert self._child.process is not None
            if self._is_stopping:
                self._end_child()
            code = self._child.process.wait()
            say(f"{self._label} {describe_exit(code)}")
            if self._is_stopping or not self._child.was_ready:
                self._exit_code = code
                time.sleep(LINGER_S)
            while self._is_stopping:  # Ray would start it again; who stops it ends it
                time.sleep(LINGER_S)
        except OSError as error:
            say(f"{self._label} cannot be started: {error}")
        finally:
            os._exit(1)

    def _wait_until_ready(self, reports: socket.socket) -> None:
        while not self._child.was_ready:
            self._child.receive(reports, None)

    def _end_child(self) -> None:
        self._child.signal(signal.SIGTERM)
        self._child.signal(signal.SIGCONT)  # a stopped process would not end


class RayShardActor(ShardActor):
    """A shard on the address of its Ray node, with the environment that the node was started in.
    It ends with the node's own process, the raylet."""

    def __init__(self, label: str, arguments: Sequence[str]) -> None:
        import ray

        raylet = int(os.environ["RAY_RAYLET_PID"])
        environment = environment_of(raylet)
        threading.Thread(target=end_after, args=(raylet,), daemon=True).start()
        super().__init__(label, arguments, ray.util.get_node_ip_address(), environment)


def end_after(pid: int) -> None:
    """Waits until the process ``pid`` has ended, and ends this one. Ray looks for that, too, but
    does not see a raylet that has ended and that nobody has waited for."""
    with suppress(OSError):  # Linux before 5.3
        descriptor = os.pidfd_open(pid)
        select.select([descriptor], [], [])
        os._exit(1)


def environment_of(raylet: int) -> dict[str, str]:
    """Returns the environment that a Ray node was started in, without what Ray sets for workers,
    such as OMP_NUM_THREADS."""
    content = Path(f"/proc/{raylet}/environ").read_bytes()
    pairs = (entry.partition(b"=") for entry in content.split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
