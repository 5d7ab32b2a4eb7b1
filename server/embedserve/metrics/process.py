"""Process metrics summed over all workers: processor time, memory and file descriptors.

Each worker writes its own values into its row of cells, so that no worker reads another's /proc.
The processor time of a worker that died stays counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from embedserve.metrics.log_stream import dropped_lines
from embedserve.metrics.shared_counters import WorkerCounters

_GAUGES = (
    ("process_virtual_memory_bytes", "Virtual memory of all workers, in bytes."),
    (
        "process_resident_memory_bytes",
        "Resident memory of all workers, in bytes; pages that they share count in each.",
    ),
    ("process_open_fds", "Open file descriptors of all workers."),
    ("process_max_fds", "File descriptors that all workers together may open."),
)
_CPU_SECONDS = "process_cpu_seconds"
_START_SECONDS = "process_start_time_seconds"
PROCESS_CELLS = 3 + len(_GAUGES)


class ProcessMetrics:
    """The process metrics of prometheus_client, summed over one or several workers."""

    def __init__(self, counters: WorkerCounters) -> None:
        self._cells = counters.allocate(PROCESS_CELLS)
        self._cpu_s_before = float(self._cells.own[0])
        self._dropped_before = float(self._cells.own[-1]) - dropped_lines()
        self._process = ProcessCollector(registry=None)

    def flush(self) -> None:
        read = {family.name: family.samples[0].value for family in self._process.collect()}
        cpu_s = self._cpu_s_before + read.get(_CPU_SECONDS, 0.0)
        gauges = [read.get(name, 0.0) for name, _ in _GAUGES]
        self._cells.own[:-1] = cpu_s, read.get(_START_SECONDS, 0.0), *gauges
        self._cells.own[-1] = self._dropped_before + dropped_lines()

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            _CPU_SECONDS,
            "User and system processor time of all workers, in seconds.",
            float(self._cells.total()[0]),
        )
        of_ready = self._cells.of_ready()
        yield GaugeMetricFamily(
            _START_SECONDS,
            "When the oldest worker started, in seconds since the epoch.",
            float(of_ready[:, 1].min()) if len(of_ready) else 0.0,
        )
        for column, (name, help_text) in enumerate(_GAUGES, 2):
            yield GaugeMetricFamily(name, help_text, float(of_ready[:, column].sum()))
        yield CounterMetricFamily(
            "embedserve_log_lines_dropped",
            "Lines of the log that workers dropped, since its reader did not keep up.",
            float(self._cells.total()[-1]),
        )
