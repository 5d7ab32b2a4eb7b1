"""How many cores this process may keep busy: those it may run on, or fewer where its cgroup is
stopped sooner, as a container with a CPU limit is. The one place that counts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from embedserve_store.memory.cgroups import CGROUPS, PROC, cgroup_folders


def available_cores(proc: Path = PROC, cgroups: Path = CGROUPS, affinity: int | None = None) -> int:
    """At least 1. Of a limit of two and a half cores 2: a third thread would be stopped halfway
    through a batch, with all others.

    Args:
        affinity: how many cores the process may run on; None: as the kernel says.
    """
    if affinity is None:
        affinity = len(os.sched_getaffinity(0))
    return max(1, int(min([affinity, *_quotas(proc, cgroups)])))


def _quotas(proc: Path, cgroups: Path) -> Iterator[float]:
    """The limit of each cgroup that holds this process, in cores."""
    for version, folder in cgroup_folders("cpu", proc, cgroups):
        try:
            quota, period = _quota(version, folder)
        except OSError:  # no such limit there
            continue
        if quota not in ("max", "-1"):
            yield int(quota) / int(period)


def _quota(version: int, folder: Path) -> tuple[str, str]:
    """Microseconds of all cores together in each period, and those of a period."""
    if version == 2:
        quota, period = (folder / "cpu.max").read_text().split()
        return quota, period
    quota = (folder / "cpu.cfs_quota_us").read_text().strip()
    return quota, (folder / "cpu.cfs_period_us").read_text().strip()
