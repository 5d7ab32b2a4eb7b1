"""Where the kernel says what a control group may use: the folders of this process, both versions.

In a container the path may be the host's, of which only the root is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def cgroup_folders(
    controller: str, proc: Path = PROC, cgroups: Path = CGROUPS
) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each group that holds this process, and of those above it, of which
    there may be none. ``controller`` is "memory" or "cpu"; each group's limit counts."""
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
    except OSError:  # a kernel without groups
        return []
