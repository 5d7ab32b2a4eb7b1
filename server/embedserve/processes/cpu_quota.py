"""Number of cores that this process may use: its CPU affinity, or less under the CPU quota of its
cgroup, as in a container with a CPU limit. All code gets the number from here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from embedserve_store.memory.cgroups import CGROUPS, PROC, cgroup_folders


def available_cores(proc: Path = PROC, cgroups: Path = CGROUPS, affinity: int | None = None) -> int:
    """Returns the number of cores, at least 1. A quota of 2.5 cores gives 2: a third thread would
    be throttled halfway through a batch, together with all others.

    Args:
        affinity: number of cores that the process may run on; None: as the kernel reports.
    """
    if affinity is None:
        affinity = len(os.sched_getaffinity(0))
    return max(1, int(min([affinity, *_quotas(proc, cgroups)])))


def _quotas(proc: Path, cgroups: Path) -> Iterator[float]:
    """Yields the quota of each cgroup that contains this process, in cores."""
    for version, folder in cgroup_folders("cpu", proc, cgroups):
        try:
            quota, period = _quota(version, folder)
        except OSError:  # no quota in this cgroup
            continue
        if quota not in ("max", "-1"):
            yield int(quota) / int(period)


def _quota(version: int, folder: Path) -> tuple[str, str]:
    """Returns the microseconds that all cores together may run in each period, and those of a
    period."""
    if version == 2:
        quota, period = (folder / "cpu.max").read_text().split()
        return quota, period
    quota = (folder / "cpu.cfs_quota_us").read_text().strip()
    return quota, (folder / "cpu.cfs_period_us").read_text().strip()
