"""Forks the workers of a server, restarts workers that exit, and stops them all together.

Runs in the process that the user started. That process has no threads and never imports torch or
grpc, so that it can fork workers at any time. No request passes through it.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from embedserve.metrics.shared_counters import SharedCounters
from embedserve.processes.applier_supervision import ApplierSupervision
from embedserve.processes.channel import SupervisorChannel
from embedserve.processes.forked import (
    HangWatch,
    Restarts,
    describe_exit,
    fork,
    poll_exit_code,
)
from embedserve.processes.rollout.coordinator import RolloutCoordinator
from embedserve.processes.rollout.messages import (
    Desired,
    StartReport,
    WorkerStatus,
    message_to_bytes,
    report_from_bytes,
)
from embedserve.processes.signals import wake_on_signals

logger = logging.getLogger(__name__)

KILL_AFTER_S = 4.0
"""Seconds after the drain before a worker that is still running is killed."""
POLL_S = 1.0
"""Seconds between two checks of the workers."""
PREPARING_HANG_S = 60.0
"""Seconds without a heartbeat, at least, before a worker that loads a version counts as hung.
Compiling a large model blocks its event loop."""

WorkerMain = Callable[[int, socket.socket], int]
"""Serves as the worker with that number, with its end of the channel, until it is stopped. Returns
the exit code of its process."""


class WorkerFailedError(ChildProcessError):
    """A worker ended before the server was ready. The message gives the reason."""


@dataclass
class _Worker:
    """A worker's place, and the process that fills it."""

    index: int
    pid: int = 0
    """Process id; 0 while there is no process."""
    hang_watch: HangWatch = field(init=False)
    """Watch of the present process."""
    channel: SupervisorChannel | None = None
    desired: Desired | None = None
    """Last desired state; None for a worker that has yet to receive one."""
    logs_ready: bool = False
    warm_status: WorkerStatus | None = None
    """Status of a warm worker that awaits a desired state; None for other workers."""
    is_listening: bool = False
    reason: str = ""
    restarts: Restarts = field(default_factory=Restarts)
    listening_s: float = 0.0
    """Monotonic time since which the worker listens."""
    beats: float = 0.0


class Supervisor:
    """The workers of one server."""

    def __init__(
        self,
        worker_main: WorkerMain,
        shared_counters: SharedCounters,
        drain_s: float,
        hang_s: float,
        coordinator: RolloutCoordinator,
        find_damage: Callable[[], str] = str,
        end_startup_server: Callable[[], None] = lambda: None,
        on_ready: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
        applier_main: Callable[[socket.socket], int] | None = None,
    ) -> None:
        """
        Args:
            shared_counters: counters of the workers; the supervisor writes to them which workers
                are ready.
            hang_s: seconds that a worker may go without a heartbeat; 0: no limit.
            coordinator: decides which versions the workers serve.
            find_damage: returns which file is damaged, "" for none; called when a worker ended by
                SIGBUS, as when a file was truncated.
            end_startup_server: called when a worker is ready; the worker accepts no connection
                before the call returns.
            on_ready: called once, when all workers listen for the first time.
            on_stop: called before the workers are stopped.
            applier_main: applies the deltas of the coordinator's versions, in a process of its own;
                None: no deltas are applied.
        """
        self._end_startup_server = end_startup_server
        self._on_ready, self._on_stop = on_ready, on_stop
        self._coordinator = coordinator
        coordinator.send, coordinator.end = self._send_to, self._end
        self._find_damage = find_damage
        self._worker_main = worker_main
        self._counters = shared_counters
        self._drain_s = drain_s
        self._hang_s = hang_s
        self._checked_s = time.monotonic()
        self._workers = [_Worker(index) for index in range(len(shared_counters.rows))]
        self._selector = selectors.DefaultSelector()
        self._applier = ApplierSupervision(
            applier_main, coordinator.delta_versions, self._selector, self._close_inherited
        )
        self._are_released = False
        self._were_ready = False
        self._is_stopping = self._is_hurried = self._is_reload_requested = False

    def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains.

        Raises:
            WorkerFailedError: a worker ended before all were ready for the first time.
        """
        with wake_on_signals(self._selector, self._stop, self._request_reload):
            try:
                self._applier.check()
                for worker in self._workers:
                    self._start(worker)
                while not self._is_stopping:
                    self._step()
            finally:
                self._drain()
                self._selector.close()

    def _stop(self) -> None:
        self._is_hurried = self._is_stopping
        self._is_stopping = True

    def _request_reload(self) -> None:
        self._is_reload_requested = True  # a signal handler may interrupt the coordinator

    def _step(self) -> None:
        """Waits for an event or a timeout, and handles it."""
        self._wait(self._seconds_to_restart())
        if self._is_reload_requested:
            self._is_reload_requested = False
            self._coordinator.reload()
        if not self._is_stopping:
            self._applier.check()
        self._release_workers()
        self._check_heartbeats()
        self._coordinator.advance_rollout()
        for worker in self._workers:
            if worker.pid and (status := poll_exit_code(worker.pid)) is not None:
                self._reap(worker, status)
            is_due = worker.restarts.at_s <= time.monotonic()
            if not worker.pid and not self._is_stopping and is_due:
                self._start(worker)

    def _wait(self, timeout_s: float) -> None:
        for key, events in self._selector.select(timeout_s):
            key.data(events)

    def _seconds_to_restart(self) -> float:
        now_s = time.monotonic()
        waits = [worker.restarts.at_s - now_s for worker in self._workers if not worker.pid]
        if not self._applier.pid:
            waits.append(self._applier.restarts.at_s - now_s)
        return max(0.0, min([POLL_S, *waits]))

    def _check_heartbeats(self) -> None:
        """Ends workers, and the applier, that have sent no heartbeat for too long.

        Time in which this process did not run either, as when all are frozen, does not count.
        """
        now_s = time.monotonic()
        passed_s, self._checked_s = min(now_s - self._checked_s, 2 * POLL_S), now_s
        self._applier.check_heartbeat(passed_s, self._hang_s)
        for worker in self._workers:
            if not worker.pid:
                continue
            beats = self._counters.beats(worker.index)
            is_alive = beats != worker.beats or not worker.is_listening
            if is_alive:
                worker.beats = beats
                worker.hang_watch.on_heartbeat()
            silent_s = 0.0 if is_alive else passed_s
            hang_s = self._hang_s or math.inf
            if self._coordinator.is_preparing(worker.index):
                hang_s = max(hang_s, PREPARING_HANG_S)
            if worker.hang_watch.check(worker.pid, silent_s, hang_s, now_s):
                self._counters.count_hang(worker.index)
                self._counters.set_ready(worker.index, False)

    def _start(self, worker: _Worker) -> None:
        """Forks a worker. If that fails, it is tried again later; before the server was ready,
        OSError is raised."""
        self._coordinator.on_worker_fork()
        worker.reason, worker.logs_ready = "", False
        worker.hang_watch = HangWatch(f"worker {worker.index}", logger)
        try:
            worker.pid, ours = fork(partial(self._worker_main, worker.index), self._close_inherited)
            worker.channel = SupervisorChannel(ours, self._selector, lambda: self._receive(worker))
        except OSError as error:
            if not self._were_ready:
                raise
            delay_s = worker.restarts.schedule(time.monotonic(), was_ready=False)
            logger.error(
                "worker %d cannot be started: %s; it is tried again in %g s",
                worker.index,
                error,
                delay_s,
            )

    def _close_inherited(self) -> None:
        """Closes in a forked process the channels of the others, and the selector."""
        for other in self._workers:
            if other.channel is not None:
                other.channel.close()
        self._applier.close()
        self._selector.close()

    def _receive(self, worker: _Worker) -> None:
        assert worker.channel is not None
        messages = worker.channel.receive()
        if messages is None:
            # The worker is exiting or has exited; SIGCHLD reports the exit.
            worker.channel.end()
            worker.channel = None
        for message in messages or ():
            self._on_message(worker, message)

    def _on_message(self, worker: _Worker, message: bytes) -> None:
        report = report_from_bytes(message)
        if isinstance(report, StartReport):
            self._on_start_report(worker, report)
        elif worker.desired is None and isinstance(report, WorkerStatus):
            worker.warm_status = report
        elif not self._is_stopping:
            self._coordinator.on_report(worker.index, report)

    def _on_start_report(self, worker: _Worker, report: StartReport) -> None:
        if report.reason is not None:
            worker.reason = report.reason
            return
        worker.is_listening, worker.listening_s = True, time.monotonic()
        self._counters.set_ready(worker.index, True)
        self._end_startup_server()
        self._send(worker)  # it may accept now
        if self._were_ready:
            logger.info("worker %d is ready again", worker.index)

    def _release_workers(self) -> None:
        """Starts warm workers: the first time all together, afterwards each by itself. Each listens
        once it serves what the others serve."""
        self._are_released = self._are_released or (
            all(worker.warm_status is not None for worker in self._workers)
            and self._applier.is_ready()
        )
        if not self._are_released:
            return
        for worker in self._workers:
            if worker.warm_status is not None and worker.channel is not None:
                self._coordinator.on_worker_start(worker.index, worker.warm_status)
                worker.warm_status = None
        if not self._were_ready and all(worker.is_listening for worker in self._workers):
            self._were_ready = self._workers[0].logs_ready = True
            self._send(self._workers[0])
            self._on_ready()

    def _reap(self, worker: _Worker, status: int) -> None:
        """Clears the place of a worker that exited with ``status``, and schedules its restart."""
        pid, worker.pid = worker.pid, 0  # the coordinator may want to end it for its last messages
        while worker.channel is not None:
            self._receive(worker)
        how = describe_exit(status)
        if status == -signal.SIGBUS and (found := self._find_damage()):
            how += f" ({found})"
        self._counters.set_ready(worker.index, False)
        self._applier.clear_reader(worker.index)
        if not self._is_stopping:
            self._coordinator.on_worker_exit(worker.index, how)
        was_ready = worker.is_listening
        worker.desired, worker.warm_status, worker.is_listening = None, None, False
        if self._is_stopping:
            return
        if not self._were_ready:
            raise WorkerFailedError(
                worker.reason or f"worker {worker.index} {how} before the server was ready"
            )
        now_s = time.monotonic()
        well_s = now_s - worker.listening_s if was_ready else 0.0
        delay_s = worker.restarts.schedule(now_s, well_s, was_ready=was_ready)
        self._counters.count_restart(worker.index)
        logger.error(
            "worker %d (process %d) %s%s: %s",
            worker.index,
            pid,
            how,
            "" if was_ready else f" before it was ready ({worker.reason or 'no reason given'})",
            f"restarted in {delay_s:g} s" if delay_s else "restarted",
        )

    def _drain(self) -> None:
        """Stops all workers, which complete the requests that they accepted. Kills workers that do
        not exit in time."""
        self._is_stopping = True
        self._on_stop()
        self._signal_all(signal.SIGTERM)
        kill_at_s = time.monotonic() + self._drain_s + KILL_AFTER_S
        is_killed = False
        while self._applier.pid or any(worker.pid for worker in self._workers):
            left_s = kill_at_s - time.monotonic()
            if (left_s <= 0 or self._is_hurried) and not is_killed:
                is_killed = True
                why = "a second signal came" if self._is_hurried else "they did not end in time"
                logger.error("workers are killed: %s", why)
                self._signal_all(signal.SIGKILL)
            self._wait(min(POLL_S, max(0.01, left_s)))
            self._applier.reap()
            for worker in self._workers:
                if worker.pid and (status := poll_exit_code(worker.pid)) is not None:
                    self._reap(worker, status)

    def _send_to(self, index: int, desired: Desired) -> None:
        self._workers[index].desired = desired
        self._send(self._workers[index])

    def _send(self, worker: _Worker) -> None:
        """Sends a worker its desired state, and what it may do by now."""
        if worker.channel is not None and worker.desired is not None:
            desired = replace(
                worker.desired, may_accept=worker.is_listening, logs_ready=worker.logs_ready
            )
            worker.channel.send(message_to_bytes(desired))

    def _end(self, index: int) -> None:
        worker = self._workers[index]
        if worker.pid:
            os.kill(worker.pid, signal.SIGTERM)

    def _signal_all(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.pid:
                os.kill(worker.pid, number)
        self._applier.signal(number)
