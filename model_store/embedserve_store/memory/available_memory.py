"""How much memory this process may still use: what the host has, or less if its cgroup has less.

Reads /proc and the cgroup files of both versions; where there are none, the host's figure counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from embedserve_store.memory.cgroups import CGROUPS, PROC, cgroup_folders

FILES = {1: ("memory.limit_in_bytes", "total_rss"), 2: ("memory.max", "anon")}
"""By the version of the groups: where the limit stands, and what memory.stat calls what is used."""


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that can be used without swapping, and without reaching the limit of a cgroup."""
    return min([_host_bytes(proc), *_cgroup_bytes(proc, cgroups)])


def _host_bytes(proc: Path) -> int:
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


def _cgroup_bytes(proc: Path, cgroups: Path) -> Iterator[int]:
    """What the limit of each cgroup that holds this process leaves; page cache gives way."""
    for version, folder in cgroup_folders("memory", proc, cgroups):
        if (left := _left_bytes(folder, *FILES[version])) is not None:
            yield left


def _left_bytes(folder: Path, limit: str, used: str) -> int | None:
    """None where there is no limit."""
    try:
        text = (folder / limit).read_text().strip()
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if text == "max":
        return None
    return max(0, int(text) - int(fields[used]))
