"""Tests of the CPU quota: the process's affinity, or the limit of the nearest cgroup."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from server.fake_engine import FakeEngine

from embedserve.batching.batcher import AT_ONCE
from embedserve.config import ServeSettings
from embedserve.processes.cpu_quota import available_cores
from embedserve.processes.server import executor_threads, lookup_threads


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "self").mkdir()
    return tmp_path


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    return tmp_path / "cgroups"


def in_group(proc: Path, lines: str) -> None:
    (proc / "self" / "cgroup").write_text(lines)


def limit(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("cpu_", "cpu.", 1)).write_text(text + "\n")


def test_a_host_without_groups(proc: Path, groups: Path) -> None:
    assert available_cores(proc, groups, 64) == 64
    in_group(proc, "0::/\n")
    assert available_cores(proc, groups, 64) == 64


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [
        ("max 100000", 64),
        ("200000 100000", 2),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("9600000 100000", 64),
        ("40000 10000", 4),
    ],
)
def test_version_2(proc: Path, groups: Path, cpu_max: str, cores: int) -> None:
    in_group(proc, "0::/pod/container\n")
    limit(groups / "pod" / "container", cpu_max=cpu_max)
    assert available_cores(proc, groups, 64) == cores


def test_a_limit_of_a_group_above_counts(proc: Path, groups: Path) -> None:
    """Covers a pod: kubelet limits both its containers and their sum."""
    in_group(proc, "0::/pod/container\n")
    limit(groups / "pod" / "container", cpu_max="800000 100000")
    limit(groups / "pod", cpu_max="300000 100000")
    assert available_cores(proc, groups, 64) == 3


def test_a_container_sees_its_own_group_as_the_root(proc: Path, groups: Path) -> None:
    in_group(proc, "0::/unseen/path\n")
    limit(groups, cpu_max="300000 100000")
    assert available_cores(proc, groups, 64) == 3


def test_version_1(proc: Path, groups: Path) -> None:
    in_group(proc, "5:cpu,cpuacct:/job\n4:memory:/other\n")
    limit(groups / "cpu" / "job", cpu_cfs_quota_us="400000", cpu_cfs_period_us="100000")
    limit(groups / "cpu", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
    assert available_cores(proc, groups, 64) == 4
    limit(groups / "cpu" / "job", cpu_cfs_quota_us="-1")
    assert available_cores(proc, groups, 64) == 64


def test_workers_share_what_this_process_has() -> None:
    cores = available_cores()
    assert 1 <= cores <= len(os.sched_getaffinity(0))
    assert lookup_threads(ServeSettings(store="", workers=1)) == cores
    assert lookup_threads(ServeSettings(store="", workers=2 * cores)) == 1


def test_there_is_a_thread_for_each_batch_that_gpus_have_at_once() -> None:
    settings, on_cpu = ServeSettings(store=""), FakeEngine()
    on_gpus = FakeEngine(on_cpu.model)
    on_gpus.waits_for_device, on_gpus.replicas = True, 500
    assert executor_threads(settings, [on_cpu]) == 2 * lookup_threads(settings)
    assert executor_threads(settings, [on_cpu, on_gpus, on_gpus]) == 2 * 500 * AT_ONCE
