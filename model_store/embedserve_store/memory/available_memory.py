"""Measures the memory that this process may still use, on the host and within its cgroups.

Reads /proc and the cgroup files of both versions. Without cgroup files the host's value counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from embedserve_store.memory.cgroups import CGROUPS, PROC, cgroup_folders

FILES = {
    1: ("memory.limit_in_bytes", ("total_rss", "total_shmem")),
    2: ("memory.max", ("anon", "shmem")),
}
"""Name of the limit file, and names of the used memory in memory.stat, by cgroup version."""


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Returns the bytes that can be used without swapping or reaching the limit of a cgroup."""
    return min([_host_bytes(proc), *_cgroup_bytes(proc, cgroups)])


def _host_bytes(proc: Path) -> int:
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


def _cgroup_bytes(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yields the bytes left below the limit of each cgroup of this process.

    The page cache of files does not count as used, because the kernel reclaims it. Files in memory,
    such as the changed rows of followed versions and /dev/shm, do count.
    """
    for version, folder in cgroup_folders("memory", proc, cgroups):
        if (left := _left_bytes(folder, *FILES[version])) is not None:
            yield left


def _left_bytes(folder: Path, limit: str, used: tuple[str, ...]) -> int | None:
    """Returns the bytes left below the limit of the cgroup in ``folder``; None without a limit."""
    try:
        text = (folder / limit).read_text().strip()
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if text == "max":
        return None
    return max(0, int(text) - sum(int(fields.get(name, 0)) for name in used))
