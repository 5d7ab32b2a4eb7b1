"""How much memory this process may still use: what the host has, or less if its cgroup has less.

Reads /proc and the cgroup files of both versions; where there are none, the host's figure counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that can be used without swapping, and without reaching the limit of a cgroup."""
    return min([_host_bytes(proc), *_cgroup_bytes(proc, cgroups)])


def _host_bytes(proc: Path) -> int:
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


def _cgroup_bytes(proc: Path, cgroups: Path) -> Iterator[int]:
    """What the limit of each cgroup that holds this process leaves; page cache gives way."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, used = cgroups, "memory.max", "anon"
        elif "memory" in controllers.split(","):
            root, limit, used = cgroups / "memory", "memory.limit_in_bytes", "total_rss"
        else:
            continue
        folder = root / path.lstrip("/")
        for one in (folder, *folder.parents):
            # In a container the path may be the host's, of which only the root is seen.
            if one.is_relative_to(root) and (left := _left_bytes(one, limit, used)) is not None:
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
