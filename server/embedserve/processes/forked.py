"""Forks processes, ends them with their parent or if they hang, and describes how they ended."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

RESTART_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds until the next start after one failure, two, and so on. The last one is also that of all
further failures."""
QUICK_END_S = 60.0
"""Seconds that a process must run, a worker or a shard from when it was ready, for its count of
failures to be reset. One that ends sooner is started again without a delay only the first time."""
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
LAST_WORDS_S = 0.5
"""Seconds that a hung process has to dump its stacks before it is killed."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def fork(
    main: Callable[[socket.socket], int], close_inherited: Callable[[], None]
) -> tuple[int, socket.socket]:
    """Forks a process that calls ``main`` with its end of a channel, and ends with its exit code.

    Args:
        close_inherited: closes in the new process what belongs to this one.

    Returns:
        The process id, and this process's end of the channel.

    Raises:
        OSError: there is no process, memory or descriptor left.
        Any error of a signal handler. Then no process is left.
    """
    ours, theirs = socket.socketpair()
    try:
        pid = _forked(main, ours, theirs, close_inherited)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return pid, ours


def _forked(
    main: Callable[[socket.socket], int],
    ours: socket.socket,
    theirs: socket.socket,
    close_inherited: Callable[[], None],
) -> int:
    """Returns the process id; in the forked process it does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal that arrives before the child has reset our handlers would run them in the child.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    pid = 0
    try:
        try:
            pid = os.fork()
            if not pid:
                ours.close()
                _run_child(main, theirs, close_inherited)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    except BaseException:  # of a handler, for a signal that arrived meanwhile
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise
    return pid


def _run_child(
    main: Callable[[socket.socket], int],
    channel: socket.socket,
    close_inherited: Callable[[], None],
) -> NoReturn:
    """Runs ``main`` in the forked process, and ends that process."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        # Ctrl-C and a closing terminal signal the children, too; the supervisor handles both.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        close_inherited()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        status = main(channel)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def poll_exit_code(pid: int) -> int | None:
    """Returns the exit code of a child that has exited (for a signal its negative number); None
    while it runs. Does not wait."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def end_with_parent(parent: int) -> None:
    """Makes the kernel send this process SIGTERM when ``parent``, which started it, ends. Ends this
    process if ``parent`` has ended before."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def describe_exit(exit_code: int) -> str:
    """Returns how a process ended, as the rest of a sentence about it."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # most real-time signals have no name
        name = f"signal {-exit_code}"
    return f"was ended by {name}"


@dataclass
class HangWatch:
    """Watches for the hang of one process, and ends it.

    Attributes:
        name: name of the process in the log.
        logger: logger of the process that watches.
        silent_s: seconds since the last heartbeat, counted only while the process that watches ran.
        kill_at_s: monotonic time at which a process that hangs is killed; None for others.
    """

    name: str
    logger: logging.Logger
    silent_s: float = 0.0
    kill_at_s: float | None = None

    def on_heartbeat(self) -> None:
        self.silent_s = 0.0

    def check(self, pid: int, passed_s: float, hang_s: float, now_s: float) -> bool:
        """Counts ``passed_s`` more seconds without a heartbeat of process ``pid``. Returns whether
        that makes it hang, after more than ``hang_s``: then it is ended.

        SIGABRT makes faulthandler write its stacks. SIGKILL follows, for one that is stopped.
        """
        if self.kill_at_s is not None:
            if now_s >= self.kill_at_s:
                os.kill(pid, signal.SIGKILL)
            return False
        self.silent_s += passed_s
        if self.silent_s <= hang_s:
            return False
        self.logger.error(
            "%s (process %d) hangs: no heartbeat for %.0f s; it is ended",
            self.name,
            pid,
            self.silent_s,
        )
        self.kill_at_s = now_s + LAST_WORDS_S
        os.kill(pid, signal.SIGABRT)
        return True


@dataclass
class Restarts:
    """When a process that ended is started again.

    Attributes:
        failures: consecutive starts that failed, and ends that were quick.
        at_s: monotonic time at which it may start.
    """

    failures: int = 0
    at_s: float = 0.0

    def schedule(self, now_s: float, well_s: float = 0.0, *, was_ready: bool) -> float:
        """Sets the time of the next start, after another failure or end. Returns the seconds until
        then: 0 the first time that the process had been ready.

        Args:
            well_s: seconds that the process ran well.
        """
        if well_s >= QUICK_END_S:
            self.failures = 0
        at_once = was_ready and not self.failures
        last = len(RESTART_DELAYS_S) - 1
        delay_s = 0.0 if at_once else RESTART_DELAYS_S[min(max(0, self.failures - 1), last)]
        self.failures += 1
        self.at_s = now_s + delay_s
        return delay_s
