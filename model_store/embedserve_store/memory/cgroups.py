"""Finds the cgroup folders of this process, for cgroup versions 1 and 2.

In a container /proc may show the path on the host, while only the root of it is visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def cgroup_folders(controller: str, proc: Path, cgroups: Path) -> Iterator[tuple[int, Path]]:
    """Yields (version, folder) of each cgroup of this process and of its ancestors.

    The limit of each cgroup counts. A folder may not exist.

    Args:
        controller: "memory" or "cpu".
    """
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, root = 2, cgroups
        elif controller in controllers.split(","):
            version, root = 1, cgroups / controller
        else:
            continue
        folder = root / path.lstrip("/")
        for one in (folder, *folder.parents):
            if one.is_relative_to(root):
                yield version, one


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # a kernel without cgroups
        return []
