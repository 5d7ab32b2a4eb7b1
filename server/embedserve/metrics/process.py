"""Process metrics summed over all workers: processor time, memory and file descriptors.

Each worker writes its own values into its row of cells, so that no worker reads another's /proc.
The processor time of a worker that died stays counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import ProcessCollector

from embedserve.metrics.families import Sample
from embedserve.metrics.log_stream import dropped_lines
from embedserve.metrics.shared_counters import WorkerCounters

CPU_SECONDS = "process_cpu_seconds"
START_SECONDS = "process_start_time_seconds"
GAUGES = (
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_open_fds",
    "process_max_fds",
)
PROCESS_CELLS = 3 + len(GAUGES)


class ProcessMetrics:
    """The process metrics of prometheus_client, summed over one or several workers."""

    def __init__(self, counters: WorkerCounters) -> None:
        self._cells = counters.allocate(PROCESS_CELLS)
        self._cpu_s_before = float(self._cells.own[0])
        self._dropped_before = float(self._cells.own[-1]) - dropped_lines()
        self._process = ProcessCollector(registry=None)

    def flush(self) -> None:
        read = {family.name: family.samples[0].value for family in self._process.collect()}
        cpu_s = self._cpu_s_before + read.get(CPU_SECONDS, 0.0)
        gauges = [read.get(name, 0.0) for name in GAUGES]
        self._cells.own[:-1] = cpu_s, read.get(START_SECONDS, 0.0), *gauges
        self._cells.own[-1] = self._dropped_before + dropped_lines()

    def samples(self) -> Iterator[Sample]:
        total, ready = self._cells.total(), self._cells.ready_rows()
        yield CPU_SECONDS, (), float(total[0])
        yield START_SECONDS, (), float(ready[:, 1].min()) if len(ready) else 0.0
        for name, value in zip(GAUGES, ready[:, 2:-1].sum(axis=0).tolist(), strict=True):
            yield name, (), value
        yield "embedserve_log_lines_dropped", (), float(total[-1])
