"""Reads /proc: the children, memory and CPU time of processes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    """Returns the child processes of a process, whichever of its threads started them."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since
            found += map(int, listed.read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Returns a process and all processes below it."""
    found = [pid]
    for one in found:  # which grows
        found += children(one)
    return found


def memory_bytes(pid: int) -> dict[str, int]:
    """Returns the bytes of a process by kind of memory, such as Pss or Anonymous.

    Raises:
        OSError: the process has ended.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of a process and all processes below it, of threads that still run.

    The kernel counts them in nanoseconds.
    """
    nanoseconds = 0
    for one in descendants(pid):
        for counts in Path(f"/proc/{one}/task").glob("*/schedstat"):
            with suppress(FileNotFoundError, ProcessLookupError):
                nanoseconds += int(counts.read_text().split()[0])
    return nanoseconds / 1e9
