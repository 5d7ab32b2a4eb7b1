"""Values of the process, also while it has no file descriptor left to read them with."""

from __future__ import annotations

import json

from server.python import run_python

MAX_FDS = 64
SCRIPT = f"""
import json, os, resource
from embedserve.metrics.process import PROCESS_CELLS, READ_S, ProcessMetrics
from embedserve.metrics.shared_counters import single_worker_counters

resource.setrlimit(resource.RLIMIT_NOFILE, ({MAX_FDS}, {MAX_FDS}))
now_s = 100.0
metrics = ProcessMetrics(single_worker_counters(PROCESS_CELLS), lambda: now_s)

def show():
    metrics.flush()
    print(json.dumps({{name: value for name, _, value in metrics.samples()}}))

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


def test_values_stay_right_while_no_descriptor_is_left() -> None:
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
    assert cpu_s[0] > 0
