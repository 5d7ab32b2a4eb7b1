"""Tests of the CPU quota: the process's affinity, or the limit of the nearest cgroup."""

import os
from pathlib import Path

import pytest
from server.fake_engine import FakeEngine

from embedserve.batching.batcher import BATCHES_PER_REPLICA
from embedserve.config import ServeSettings
from embedserve.processes.cpu_quota import available_cores
from embedserve.processes.server import executor_threads, threads_per_batch


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "self").mkdir()
    return tmp_path


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    return tmp_path / "cgroups"


def set_cgroup(proc: Path, lines: str) -> None:
    (proc / "self" / "cgroup").write_text(lines)


def set_quota(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("cpu_", "cpu.", 1)).write_text(text + "\n")


def test_host_without_cgroup_limit_has_all_cores(proc: Path, cgroups: Path) -> None:
    assert available_cores(proc, cgroups, 64) == 64
    set_cgroup(proc, "0::/\n")
    assert available_cores(proc, cgroups, 64) == 64


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
def test_cgroup_v2_quota_limits_cores(proc: Path, cgroups: Path, cpu_max: str, cores: int) -> None:
    set_cgroup(proc, "0::/pod/container\n")
    set_quota(cgroups / "pod" / "container", cpu_max=cpu_max)
    assert available_cores(proc, cgroups, 64) == cores


def test_quota_of_a_parent_cgroup_limits_cores(proc: Path, cgroups: Path) -> None:
    """Covers a pod: kubelet limits both its containers and their sum."""
    set_cgroup(proc, "0::/pod/container\n")
    set_quota(cgroups / "pod" / "container", cpu_max="800000 100000")
    set_quota(cgroups / "pod", cpu_max="300000 100000")
    assert available_cores(proc, cgroups, 64) == 3


def test_quota_of_the_visible_root_cgroup_applies_in_a_container(proc: Path, cgroups: Path) -> None:
    set_cgroup(proc, "0::/unseen/path\n")
    set_quota(cgroups, cpu_max="300000 100000")
    assert available_cores(proc, cgroups, 64) == 3


def test_cgroup_v1_quota_limits_cores(proc: Path, cgroups: Path) -> None:
    set_cgroup(proc, "5:cpu,cpuacct:/job\n4:memory:/other\n")
    set_quota(cgroups / "cpu" / "job", cpu_cfs_quota_us="400000", cpu_cfs_period_us="100000")
    set_quota(cgroups / "cpu", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
    assert available_cores(proc, cgroups, 64) == 4
    set_quota(cgroups / "cpu" / "job", cpu_cfs_quota_us="-1")
    assert available_cores(proc, cgroups, 64) == 64


def test_workers_share_the_cores_of_the_process() -> None:
    cores = available_cores()
    assert 1 <= cores <= len(os.sched_getaffinity(0))
    assert threads_per_batch(ServeSettings(store="", workers=1)) == cores
    assert threads_per_batch(ServeSettings(store="", workers=2 * cores)) == 1


def test_executor_has_a_thread_for_each_concurrent_gpu_batch() -> None:
    settings, on_cpu = ServeSettings(store=""), FakeEngine()
    on_gpus = FakeEngine(on_cpu.model)
    on_gpus.waits_for_device, on_gpus.replicas = True, 500
    assert executor_threads(settings, [on_cpu]) == 2 * threads_per_batch(settings)
    assert executor_threads(settings, [on_cpu, on_gpus, on_gpus]) == 2 * 500 * BATCHES_PER_REPLICA
