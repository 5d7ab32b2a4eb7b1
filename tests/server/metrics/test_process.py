"""Tests of the metrics of the process, also when it has no file descriptor left to read them, and
of the connections of all workers."""

import json

from server.python import run_python

from embedserve.metrics.process import ConnectionMetrics
from embedserve.metrics.shared_counters import SharedCounters, WorkerCounters

MAX_FDS = 64
SCRIPT = f"""
import json, os, resource, time
from embedserve.metrics.process import READ_S, ProcessMetrics
from embedserve.metrics.shared_counters import single_worker_counters

resource.setrlimit(resource.RLIMIT_NOFILE, ({MAX_FDS}, {MAX_FDS}))
now_s = 100.0
metrics = ProcessMetrics(single_worker_counters(), lambda: now_s)

def show():
    metrics.flush()
    values = {{name: value for name, _, value in metrics.samples()}}
    print(json.dumps(values | {{"cpu_s_max": time.process_time() + 0.1}}))  # it may be rounded

show()
opened = [os.open("/dev/null", os.O_RDONLY)]
now_s += READ_S / 2
show()
now_s += READ_S / 2
show()
try:
    while True:
        opened.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    now_s += READ_S
    show()
for one in opened:
    os.close(one)
now_s += READ_S
show()
"""


def test_process_metrics_are_correct_without_free_file_descriptors() -> None:
    ran = run_python("-c", SCRIPT)
    assert ran.returncode == 0, ran.stderr
    first, soon, later, full, after = map(json.loads, ran.stdout.splitlines())
    assert soon["process_open_fds"] == first["process_open_fds"]  # not listed at each flush
    assert later["process_open_fds"] == first["process_open_fds"] + 1
    assert full["process_open_fds"] == MAX_FDS
    assert after["process_open_fds"] == first["process_open_fds"]
    for values in (first, soon, later, full, after):
        assert values["process_max_fds"] == MAX_FDS
        assert values["process_start_time_seconds"] == first["process_start_time_seconds"] > 0
        assert values["process_resident_memory_bytes"] > 0
        assert values["process_virtual_memory_bytes"] > 0
    cpu_s = [one["process_cpu_seconds"] for one in (first, soon, later, full, after)]
    assert cpu_s == sorted(cpu_s)
    assert 0 < cpu_s[0] <= cpu_s[-1] <= after["cpu_s_max"]


def test_connections_of_ready_workers_and_all_rejections_are_counted() -> None:
    slots = SharedCounters(2)
    workers = [ConnectionMetrics(WorkerCounters(slots, number)) for number in range(2)]

    def exported() -> list[object]:
        return [value for _, _, value in workers[0].samples()]

    for number, worker in enumerate(workers):
        slots.set_ready(number, True)
        worker.open_counts += [lambda: 3, lambda: 1]  # of the ports, and of the management port
        worker.refused += 2
        worker.flush()
    assert exported() == [8.0, 4.0]
    slots.set_ready(1, False)  # it has ended
    assert exported() == [4.0, 4.0]
    replacement = ConnectionMetrics(WorkerCounters(slots, 1))
    replacement.refused += 1
    replacement.flush()
    slots.set_ready(1, True)
    assert exported() == [4.0, 5.0]
