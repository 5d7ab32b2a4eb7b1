"""What befalls the server: a worker killed, a worker that hangs, a restart nobody may notice."""

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
"""So few that overload is refused within a fraction of a second."""
OPTIONS = (
    *("--allowed-host", "*"),  # callers send names of their own
    *("--workers", 2, "--worker-hang-s", HANG_S, "--drain-s", DRAIN_S),
    *("--queue-examples-max", QUEUE_EXAMPLES),
)
WHOLE_S_MAX = 240.0
"""Until a worker is replaced: it may have to wait for 30 s, and imports torch on busy cores."""
POLL_S = 0.02
BEFORE_S = 1.0
"""A connection may be opened so long before its worker accepts it."""
CLOSED_S = 0.1
"""After its process was reaped, in which the kernel may still hand connections to its sockets: some
were reset that had been opened nine milliseconds later."""
AFTER_S = 10.0
"""In which a client notices that its connection has ended."""
ESTABLISHED = "01"
KILL, HANG, RESTART = "kill", "hang", "restart"


@dataclass
class Fault:
    """One that was done.

    Attributes:
        kind: KILL, HANG or RESTART.
        is_overload: in which kind of phase.
        held: ports of the clients whose connections the worker had.
        gone_s: when its process was no more.
        whole_s: when all workers served again, or the server before had ended.
        lost: requests that clients lost with it, by their kind.
    """

    kind: str
    at_s: float
    is_overload: bool
    held: frozenset[int] = frozenset()
    gone_s: float = 0.0
    whole_s: float = 0.0
    lost: dict[str, int] = field(default_factory=dict)

    def explains(self, loss: Loss) -> bool:
        """Whether the worker held it: its connection, or one that it had not accepted yet."""
        if self.kind == RESTART or not self.at_s - BEFORE_S <= loss.at_s <= self.gone_s + AFTER_S:
            return False
        is_new = not loss.answered and self.at_s - BEFORE_S <= loss.opened_s
        is_open = loss.opened_s <= self.gone_s + CLOSED_S
        is_held = is_open and (loss.port in self.held or is_new)
        return is_held or not loss.port


def planned(
    random: Random, counts: dict[str, int], phases: Phases, seconds: float
) -> list[tuple[float, str]]:
    """When to do what: each kind in overload and in calm by turns, else at any time."""
    plan = []
    turns = max(int(seconds / phases.each_s), 2)
    for first, (kind, count) in enumerate(counts.items(), 1):
        for number in range(first, first + count):
            turn = 2 * random.randrange(turns // 2) + number % 2
            plan.append((phases.start_s + (turn + random.random()) * phases.each_s, kind))
    return sorted(plan)


def held_ports(pid: int) -> frozenset[int]:
    """Ports of the clients whose connections a process has."""
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
    """The server that takes new connections, and for a while the one before it.

    Attributes:
        now: those that run, the newest last.
        stopped: exit codes of those that have ended.
        logs: of all.
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
        """Another server, which is ready and takes new connections from now on."""
        self.logs.append(self._folder / f"server-{len(self.logs)}.log")
        context = ExitStack()
        server = context.enter_context(running(self._store, self.logs[-1], *OPTIONS))
        self._contexts.append(context)
        self.now.append(server)
        self._route[:] = [int(one.rpartition(":")[2]) for one in (server.http, server.grpc)]

    def stop_oldest(self) -> None:
        """Returns when it has drained and ended."""
        self._contexts.pop(0).close()
        self.stopped.append(self.now[0].process.returncode)
        del self.now[0]

    def pids(self) -> list[int]:
        """Of all processes, as far as they have not just ended."""
        pids = [server.process.pid for server in self.now]
        return [one for pid in pids for one in (pid, *children(pid))]


class Faults:
    """Does what is planned, one after the other.

    Attributes:
        done: so far.
        stop: set where no more is to be done.
    """

    def __init__(self, servers: Servers, phases: Phases, random: Random) -> None:
        self.done: list[Fault] = []
        self.stop = Event()
        self._servers = servers
        self._phases = phases
        self._random = random
        self._acts: dict[str, Callable[[Fault], None]] = {
            KILL: self._kill,
            HANG: self._hang,
            RESTART: self._restart,
        }

    def run(self, plan: Sequence[tuple[float, str]]) -> None:
        """Raises:
        TimeoutError: the server is not whole again.
        """
        for at_s, kind in plan:
            if self.stop.wait(max(0.0, at_s - time.monotonic())):
                return
            now_s = time.monotonic()
            fault = Fault(kind, now_s, self._phases.is_overload(now_s))
            self.done.append(fault)
            self._acts[kind](fault)
            fault.whole_s = time.monotonic()

    def _kill(self, fault: Fault) -> None:
        server = self._servers.now[-1]
        pid = self._random.choice(children(server.process.pid))
        os.kill(pid, signal.SIGSTOP)  # what it holds does not change meanwhile
        fault.held = held_ports(pid)
        self._await_another(fault, server, pid, signal.SIGKILL)

    def _hang(self, fault: Fault) -> None:
        server = self._servers.now[-1]
        pid = self._random.choice(children(server.process.pid))
        os.kill(pid, signal.SIGSTOP)
        fault.held = held_ports(pid)
        self._await_another(fault, server, pid)

    def _await_another(
        self, fault: Fault, server: Running, pid: int, number: signal.Signals | None = None
    ) -> None:
        again = server.log.read_text().count("is ready again")
        if number is not None:
            os.kill(pid, number)
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
