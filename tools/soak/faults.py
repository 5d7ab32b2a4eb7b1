"""Faults: kills a worker, hangs a worker, or restarts the server without an interruption."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from random import Random
from threading import Event

from processes import children
from running_servers import Running, running
from soak.tally import Loss, Phases

HANG_S = 5
DRAIN_S = 5
QUEUE_EXAMPLES = 48
"""Examples in the server's queue; few, so that overload is rejected within a fraction of a second.
"""
OPTIONS = (
    *("--allowed-host", "*"),  # callers send names of their own
    *("--workers", 2, "--worker-hang-s", HANG_S, "--drain-s", DRAIN_S),
    *("--queue-examples-max", QUEUE_EXAMPLES),
)
WHOLE_S_MAX = 240.0
"""Seconds until a worker is replaced, at most. The supervisor may wait 30 s, and the worker imports
torch on busy cores."""
POLL_S = 0.02
BEFORE_S = 1.0
"""Seconds between the opening of a connection and its acceptance by a worker, at most."""
CLOSED_S = 0.1
"""Seconds after the end of a process in which the kernel may still assign connections to its
sockets. Connections that were opened nine milliseconds later have been reset."""
AFTER_S = 10.0
"""Seconds within which a client notices that its connection has ended."""
ESTABLISHED = "01"
KILL, HANG, RESTART = "kill", "hang", "restart"


@dataclass
class Fault:
    """A fault that was injected.

    Attributes:
        kind: KILL, HANG or RESTART.
        is_overload: whether the phase was one of overload.
        held: client ports of the worker's connections.
        gone_s: time when the worker's process had ended.
        whole_s: time when all workers served again, or the previous server had ended.
        lost: requests that clients lost with the worker, by kind.
    """

    kind: str
    at_s: float
    is_overload: bool
    held: frozenset[int] = frozenset()
    gone_s: float = 0.0
    whole_s: float = 0.0
    lost: dict[str, int] = field(default_factory=dict)

    def explains(self, loss: Loss) -> bool:
        """Returns whether the worker caused the loss: it had the connection, or had not accepted it
        yet."""
        if self.kind == RESTART or not self.at_s - BEFORE_S <= loss.at_s <= self.gone_s + AFTER_S:
            return False
        is_new = not loss.answered and self.at_s - BEFORE_S <= loss.opened_s
        is_open = loss.opened_s <= self.gone_s + CLOSED_S
        is_held = is_open and (loss.port in self.held or is_new)
        return is_held or not loss.port


def planned(
    random: Random, counts: dict[str, int], phases: Phases, seconds: float
) -> list[tuple[float, str]]:
    """Returns the times and kinds of faults. Each kind alternates between overload and calm; the
    times are random."""
    plan = []
    turns = max(int(seconds / phases.each_s), 2)
    for first, (kind, count) in enumerate(counts.items(), 1):
        for number in range(first, first + count):
            turn = 2 * random.randrange(turns // 2) + number % 2
            plan.append((phases.start_s + (turn + random.random()) * phases.each_s, kind))
    return sorted(plan)


def held_ports(pid: int) -> frozenset[int]:
    """Returns the client ports of a process's connections."""
    inodes, ports = set(), set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if found := re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink())):
                inodes.add(found[1])
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, state, *_, inode = line.split()[:10]
        if state == ESTABLISHED and inode in inodes:
            ports.add(int(remote.partition(":")[2], 16))
    return frozenset(ports)


class Servers:
    """The server that accepts new connections and, during a restart, its predecessor.

    Attributes:
        now: running servers, the newest last.
        stopped: exit codes of ended servers.
        logs: logs of all servers.
    """

    def __init__(self, store: Path, folder: Path, route: SynchronizedArray[int]) -> None:
        self.now: list[Running] = []
        self.stopped: list[int] = []
        self.logs: list[Path] = []
        self._contexts: list[ExitStack] = []
        self._store = store
        self._folder = folder
        self._route = route

    def start(self) -> None:
        """Starts another server, and routes new connections to it once it is ready."""
        self.logs.append(self._folder / f"server-{len(self.logs)}.log")
        context = ExitStack()
        server = context.enter_context(running(self._store, self.logs[-1], *OPTIONS))
        self._contexts.append(context)
        self.now.append(server)
        self._route[:] = [int(one.rpartition(":")[2]) for one in (server.http, server.grpc)]

    def stop_oldest(self) -> None:
        """Stops the oldest server, and returns once it has drained and ended."""
        self._contexts.pop(0).close()
        self.stopped.append(self.now[0].process.returncode)
        del self.now[0]

    def pids(self) -> list[int]:
        """Returns the process ids of all servers and their workers."""
        pids = [server.process.pid for server in self.now]
        return [one for pid in pids for one in (pid, *children(pid))]


class Faults:
    """Injects planned faults, one after the other.

    Attributes:
        done: faults so far.
        stop: set to inject no more.
    """

    def __init__(self, servers: Servers, phases: Phases, random: Random) -> None:
        self.done: list[Fault] = []
        self.stop = Event()
        self._servers = servers
        self._phases = phases
        self._random = random

    def run(self, plan: Sequence[tuple[float, str]]) -> None:
        """Injects the faults of a plan.

        Raises:
            TimeoutError: the server did not recover.
        """
        for at_s, kind in plan:
            if self.stop.wait(max(0.0, at_s - time.monotonic())):
                return
            now_s = time.monotonic()
            fault = Fault(kind, now_s, self._phases.is_overload(now_s))
            self.done.append(fault)
            if kind == RESTART:
                self._restart(fault)
            else:
                self._stop_worker(fault)
            fault.whole_s = time.monotonic()

    def _stop_worker(self, fault: Fault) -> None:
        """Stops a worker and, unless it is to hang, kills it. Waits until it is replaced."""
        server = self._servers.now[-1]
        pid = self._random.choice(children(server.process.pid))
        os.kill(pid, signal.SIGSTOP)  # what it holds does not change meanwhile
        fault.held = held_ports(pid)
        again = server.log.read_text().count("is ready again")
        if fault.kind == KILL:
            os.kill(pid, signal.SIGKILL)
        fault.gone_s = fault.at_s + WHOLE_S_MAX
        _wait(lambda: pid not in children(server.process.pid), "the worker has not ended")
        fault.gone_s = time.monotonic()
        _wait(
            lambda: server.log.read_text().count("is ready again") > again,
            "the worker was not replaced",
        )

    def _restart(self, fault: Fault) -> None:
        self._servers.start()
        self._servers.stop_oldest()
        fault.gone_s = time.monotonic()


def _wait(is_so: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + WHOLE_S_MAX
    while not is_so():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} in {WHOLE_S_MAX:g} s")
        time.sleep(POLL_S)
