"""The supervisor's side of the applier: forks the process that applies deltas, and replaces it when
it ends or hangs."""

from __future__ import annotations

import logging
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable

from embedserve.deltas.delta_target import to_bytes
from embedserve.processes.channel import SupervisorChannel
from embedserve.processes.forked import (
    HangWatch,
    Restarts,
    describe_exit,
    fork,
    poll_exit_code,
)
from embedserve.processes.rollout.delta_versions import DeltaVersions

logger = logging.getLogger(__name__)

FAILURES_MAX = 3
"""Ends of an applier before its first poll is done, after which the workers start without it."""
HANG_S_MIN = 180.0
"""Seconds without a heartbeat, at least, before an applier counts as hung. A request to the store
gives up after 60 s, and applying a delta of 4 GiB takes about as long on two busy cores. An applier
that is ended too early would never apply that delta."""


class ApplierSupervision:
    """Supervision of the process that applies deltas. Workers serve while there is none."""

    def __init__(
        self,
        main: Callable[[socket.socket], int] | None,
        versions: DeltaVersions,
        selector: selectors.BaseSelector,
        close_inherited: Callable[[], None],
    ) -> None:
        """
        Args:
            main: applies deltas until the supervisor is gone; None: there is no applier.
            versions: versions whose deltas are applied. Other versions are sent to the process.
            selector: wakes the supervisor at each heartbeat. One comes when the first poll is done,
                and when a next version may serve.
            close_inherited: closes in the forked process what belongs to the supervisor.
        """
        self.pid = 0
        self.restarts = Restarts(at_s=math.inf if main is None else 0.0)
        self._main, self._versions = main, versions
        versions.on_change = self._send_targets
        self._selector, self._close_inherited = selector, close_inherited
        self._channel: SupervisorChannel | None = None
        self._started_s = 0.0
        self._hang_watch: HangWatch  # of the present process, set by _start

    def is_ready(self) -> bool:
        """Returns whether workers may listen: every model has been polled for the first time, or
        the applier has failed too often to wait for it."""
        if self.restarts.failures >= FAILURES_MAX:
            return True
        return all(one.status.read().is_ready for one in self._versions.served.values())

    def check(self) -> None:
        """Starts the applier if it is due, and notices its end."""
        if self.pid and (status := poll_exit_code(self.pid)) is not None:
            self._reap(describe_exit(status))
        if not self.pid and self.restarts.at_s <= time.monotonic():
            self._start()

    def check_heartbeat(self, passed_s: float, hang_s: float) -> None:
        """Ends an applier that has sent no heartbeat for too long.

        Args:
            passed_s: seconds since the last call, without those in which this process did not run.
            hang_s: seconds that a worker may go without a heartbeat; 0: no limit.
        """
        if self.pid and hang_s:
            self._hang_watch.check(self.pid, passed_s, max(hang_s, HANG_S_MIN), time.monotonic())

    def reap(self) -> None:
        """Notices the end of an applier that is not started again."""
        if self.pid and poll_exit_code(self.pid) is not None:
            self.pid = 0
            self._end_channel()

    def clear_reader(self, worker: int) -> None:
        """Frees the rows that a worker which has ended was reading."""
        for one in self._versions.states():
            one.live.clear_cell(worker)

    def signal(self, number: signal.Signals) -> None:
        if self.pid:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Closes the channel: in a forked process without the selector's knowledge."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _start(self) -> None:
        assert self._main is not None
        self._started_s = time.monotonic()
        self._hang_watch = HangWatch("the applier of deltas", logger)
        try:
            self.pid, ours = fork(self._main, self._close_inherited)
            self._channel = SupervisorChannel(ours, self._selector, self._receive)
        except OSError as error:
            if not self.restarts.failures:  # the first start
                raise
            how = f"cannot be started: {error}"
            delay_s = self.restarts.schedule(time.monotonic(), was_ready=False)
            self._stall(how)
            logger.error("the applier of deltas %s; it is tried again in %g s", how, delay_s)

    def _send_targets(self) -> None:
        """Sends the process which versions it is to follow. A process that starts later has them
        from its fork."""
        if self._channel is not None:
            self._channel.send(to_bytes([*self._versions.targets()]))

    def _receive(self) -> None:
        assert self._channel is not None
        self._hang_watch.on_heartbeat()
        if self._channel.receive() is None:  # it exits; SIGCHLD reports the exit
            self._end_channel()

    def _end_channel(self) -> None:
        if self._channel is not None:
            self._channel.end()
            self._channel = None

    def _reap(self, how: str) -> None:
        was_ready, now_s = self.is_ready(), time.monotonic()
        self._end_channel()
        delay_s = self.restarts.schedule(now_s, now_s - self._started_s, was_ready=was_ready)
        self._stall(how)
        pid, self.pid = self.pid, 0
        when = f"restarted in {delay_s:g} s" if delay_s else "restarted"
        logger.error("the applier of deltas (process %d) %s: %s", pid, how, when)

    def _stall(self, how: str) -> None:
        """Sets the status of each version to stalled; ``how`` the process failed is the reason."""
        for one in self._versions.states():
            one.status.stall(f"the process that applies deltas {how}")
