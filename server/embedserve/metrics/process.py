"""Process metrics summed over all workers: processor time, memory, descriptors, connections, and
log lines that were dropped.

Each worker writes its own values into its row of cells, so that no worker reads another's /proc.
The processor time of a worker that died stays counted. Reading /proc takes file descriptors: once
none is left, the values read last stay, and all descriptors are reported as open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from resource import RLIMIT_NOFILE, RUSAGE_SELF, getrlimit, getrusage
from time import monotonic

from prometheus_client import ProcessCollector

from embedserve.metrics.families import Sample
from embedserve.metrics.log_stream import dropped_lines
from embedserve.metrics.shared_counters import WorkerCounters

READ_S = 5.0
"""Seconds between two reads of /proc, at least. The kernel lists all descriptors for each: 13 ms
for 16,000, on the event loop."""
CPU_SECONDS = "process_cpu_seconds"
START_SECONDS = "process_start_time_seconds"
OPEN_FDS = "process_open_fds"
MAX_FDS = "process_max_fds"
GAUGES = ("process_virtual_memory_bytes", "process_resident_memory_bytes", OPEN_FDS, MAX_FDS)


class ProcessMetrics:
    """The process metrics of prometheus_client, and dropped log lines, over all workers."""

    def __init__(self, counters: WorkerCounters, clock: Callable[[], float] = monotonic) -> None:
        # CPU seconds, start time, the gauges, and dropped log lines, in this order.
        self._cells = counters.allocate(3 + len(GAUGES))
        self._cpu_s_before = float(self._cells.own[0])
        self._dropped_before = float(self._cells.own[-1]) - dropped_lines()
        self._process = ProcessCollector(registry=None)
        self._clock = clock
        self._read: dict[str, float] = {}
        self._read_again_s = 0.0

    def flush(self) -> None:
        now_s = self._clock()
        if now_s >= self._read_again_s:
            self._read_again_s = now_s + READ_S
            self._read_proc()
        usage = getrusage(RUSAGE_SELF)
        cpu_s = self._cpu_s_before + usage.ru_utime + usage.ru_stime
        values = [self._read.get(name, 0.0) for name in (START_SECONDS, *GAUGES)]
        self._cells.own[:-1] = cpu_s, *values
        self._cells.own[-1] = self._dropped_before + dropped_lines()

    def _read_proc(self) -> None:
        """Reads the values of /proc. ProcessCollector leaves out those that it cannot read."""
        read = {family.name: family.samples[0].value for family in self._process.collect()}
        max_fds = float(getrlimit(RLIMIT_NOFILE)[0])
        if OPEN_FDS in self._read:  # counted before, so now no descriptor is left to count them
            read.setdefault(OPEN_FDS, max_fds)
        self._read |= {**read, MAX_FDS: max_fds}

    def samples(self) -> Iterator[Sample]:
        total, ready = self._cells.total(), self._cells.ready_rows()
        yield CPU_SECONDS, (), float(total[0])
        yield START_SECONDS, (), float(ready[:, 1].min()) if len(ready) else 0.0
        for name, value in zip(GAUGES, ready[:, 2:-1].sum(axis=0).tolist(), strict=True):
            yield name, (), value
        yield "embedserve_log_lines_dropped", (), float(total[-1])


class ConnectionMetrics:
    """Open and refused connections. They are updated on the event loop's thread.

    Attributes:
        open_counts: functions that return the open connections of each server of this process.
        refused: connections that this process closed because it had connections_max.
    """

    def __init__(self, counters: WorkerCounters) -> None:
        self.open_counts: list[Callable[[], int]] = []
        self.refused = 0
        self._cells = counters.allocate(2)
        self._refused_before = float(self._cells.own[1])

    def flush(self) -> None:
        self._cells.own[0] = sum(count() for count in self.open_counts)
        self._cells.own[1] = self._refused_before + self.refused

    def samples(self) -> Iterator[Sample]:
        yield "embedserve_connections", (), float(self._cells.ready_rows()[:, 0].sum())
        yield "embedserve_connections_refused", (), float(self._cells.total()[1])
