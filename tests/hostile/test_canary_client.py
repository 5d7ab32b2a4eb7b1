"""Tests of the canary client's clock: only time spent waiting for a core does not count."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile.canary_client import uncrowded_s

BUSY = 3
BUSY_S = 1.0
SLEPT_S = 0.3
SPIN = "import os; os.sched_setaffinity(0, {%d}); print(flush=True)\nwhile True: pass"


@pytest.fixture
def busy_core() -> Iterator[int]:
    """Yields a core that other processes keep busy; the test runs on it."""
    before = os.sched_getaffinity(0)
    busy_core = min(before)
    busy_processes = [
        subprocess.Popen([sys.executable, "-c", SPIN % busy_core], stdout=subprocess.PIPE)
        for _ in range(BUSY)
    ]
    try:
        for process in busy_processes:
            assert process.stdout is not None
            process.stdout.readline()
        os.sched_setaffinity(0, {busy_core})
        yield busy_core
    finally:
        os.sched_setaffinity(0, before)
        for process in busy_processes:
            process.kill()
            process.communicate()


@pytest.mark.usefixtures("busy_core")
def test_time_waiting_for_a_core_is_not_counted() -> None:
    start_s, start_uncrowded_s = time.perf_counter(), uncrowded_s(os.getpid())
    while time.perf_counter() - start_s < BUSY_S:
        pass
    # The clock subtracts the wait twice here, because both processes are this one. The process has
    # a quarter of the core, so at most part of that quarter is left.
    assert uncrowded_s(os.getpid()) - start_uncrowded_s < BUSY_S / 2


def is_asleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_time_a_process_waits_for_input_is_counted() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(["cat"], stdin=pipe, stdout=pipe, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"!")
        process.stdout.read(1)
        while not is_asleep(process.pid):  # ``cat`` waits for a core before it waits for more input
            time.sleep(0.01)
        start_s = uncrowded_s(process.pid)
        time.sleep(SLEPT_S)
        assert uncrowded_s(process.pid) - start_s > SLEPT_S / 2
