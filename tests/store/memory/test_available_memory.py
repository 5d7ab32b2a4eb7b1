"""Tests of available memory: the host's, or the rest under the limit of the nearest cgroup."""

from pathlib import Path

import pytest

from embedserve_store.memory.available_memory import available_bytes

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Returns the /proc of a host with 8 GiB available and without a cgroup."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    meminfo = f"MemTotal: {16 << 20} kB\nMemAvailable:   {8 << 20} kB\nHugePages_Total: 0\n"
    (tmp_path / "proc" / "meminfo").write_text(meminfo)
    (tmp_path / "proc" / "self" / "cgroup").write_text("")
    return tmp_path / "proc"


def limit(folder: Path, name: str, value: object, *used: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"{value}\n")
    stat = f"file {5 * GIB}\n" + "".join(f"{one} {GIB}\n" for one in used)
    (folder / "memory.stat").write_text(stat)


def test_host_without_cgroups_reports_mem_available(proc: Path, tmp_path: Path) -> None:
    assert available_bytes(proc, tmp_path / "none") == 8 * GIB


@pytest.mark.parametrize(
    ("version", "folder", "name", "used"),
    [
        ("4:memory:", "memory", "memory.limit_in_bytes", ("total_rss", "total_shmem")),
        ("0::", "", "memory.max", ("anon", "shmem")),
    ],
)
def test_files_in_memory_count_against_the_limit(
    proc: Path, tmp_path: Path, version: str, folder: str, name: str, used: tuple[str, str]
) -> None:
    """Covers the changed rows of followed versions, which the kernel can drop nowhere."""
    (proc / "self" / "cgroup").write_text(f"{version}/job\n")
    limit(tmp_path / "cg" / folder / "job", name, 4 * GIB, *used)
    assert available_bytes(proc, tmp_path / "cg") == 2 * GIB


def test_page_cache_does_not_count_against_the_limit(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/pod/container\n")
    limit(tmp_path / "cg" / "pod" / "container", "memory.max", 4 * GIB, "anon")
    assert available_bytes(proc, tmp_path / "cg") == 3 * GIB


def test_limit_of_a_parent_cgroup_applies(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/pod/container\n")
    limit(tmp_path / "cg" / "pod" / "container", "memory.max", "max", "anon")
    limit(tmp_path / "cg" / "pod", "memory.max", 2 * GIB, "anon")
    assert available_bytes(proc, tmp_path / "cg") == GIB


def test_container_limit_is_read_at_the_cgroup_root(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/unseen/path\n")
    limit(tmp_path / "cg", "memory.max", 4 * GIB, "anon")
    assert available_bytes(proc, tmp_path / "cg") == 3 * GIB


def test_cgroup_v1_limit_applies(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("5:cpu,cpuacct:/\n4:memory:/job\n")
    limit(tmp_path / "cg" / "memory" / "job", "memory.limit_in_bytes", 3 * GIB, "total_rss")
    limit(tmp_path / "cg" / "memory", "memory.limit_in_bytes", 1 << 63, "total_rss")
    assert available_bytes(proc, tmp_path / "cg") == 2 * GIB


def test_available_memory_is_between_zero_and_the_hosts(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/\n")
    limit(tmp_path / "cg", "memory.max", 64 * GIB, "anon")
    assert available_bytes(proc, tmp_path / "cg") == 8 * GIB
    limit(tmp_path / "cg", "memory.max", GIB >> 1, "anon")
    assert available_bytes(proc, tmp_path / "cg") == 0
