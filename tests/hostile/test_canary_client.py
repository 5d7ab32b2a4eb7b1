"""Tests of the canary client's clock: only time spent waiting for a core does not count."""

from __future__ import annotations

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
def core() -> Iterator[int]:
    """Yields a core that other processes keep busy; the test runs on it."""
    before = os.sched_getaffinity(0)
    core = min(before)
    others = [
        subprocess.Popen([sys.executable, "-c", SPIN % core], stdout=subprocess.PIPE)
        for _ in range(BUSY)
    ]
    try:
        for other in others:
            assert other.stdout is not None
            other.stdout.readline()
        os.sched_setaffinity(0, {core})
        yield core
    finally:
        os.sched_setaffinity(0, before)
        for other in others:
            other.kill()
            other.communicate()


@pytest.mark.usefixtures("core")
def test_what_it_waits_for_a_core_does_not_count() -> None:
    start_s, start_uncrowded_s = time.perf_counter(), uncrowded_s(os.getpid())
    while time.perf_counter() - start_s < BUSY_S:
        pass
    # The clock subtracts the wait twice here, because both processes are this one. The process has
    # a quarter of the core, so at most part of that quarter is left.
    assert uncrowded_s(os.getpid()) - start_uncrowded_s < BUSY_S / 2


def is_asleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_what_the_other_process_waits_for_otherwise_counts() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(["cat"], stdin=pipe, stdout=pipe, bufsize=0) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(b"!")
        other.stdout.read(1)
        while not is_asleep(other.pid):  # ``cat`` waits for a core before it waits for more input
            time.sleep(0.01)
        start_s = uncrowded_s(other.pid)
        time.sleep(SLEPT_S)
        assert uncrowded_s(other.pid) - start_s > SLEPT_S / 2
