"""Tests, without a GPU, of the devices chosen for tables by what a host's GPUs are."""

import logging
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
import torch
from engine.conftest import Publish

from embedserve.engine.gpus import (
    REPLICAS,
    SHARDS,
    WORK_BYTES,
    Gpus,
    check_room,
    find_gpus,
    gpus_for,
    resolve_devices,
)
from embedserve.engine.restore import settle_devices
from embedserve_store import Manifest, Plan, Shard, StoreError, TablePlan, TableSpec

TWO = Gpus(2, (1 << 40, 1 << 40))
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040)."
BROKEN = Gpus(2, problem=f"CUDA does not start: {TOO_OLD}")


@pytest.mark.parametrize("devices", ["cpu:0", "cpu:-1", "gpu", "", "cuda:1"])
def test_unknown_device_is_named_in_the_error(devices: str) -> None:
    with pytest.raises(ValueError, match=f"devices is '{devices}'"):
        resolve_devices(devices, 1, TWO)


def test_auto_resolves_to_usable_gpus_or_the_cpu() -> None:
    assert resolve_devices("auto", 4, TWO) == resolve_devices("cuda", 4, TWO) == ("cuda", 2)
    assert resolve_devices("cpu", 4, TWO) == ("cpu", 4)
    assert resolve_devices("cpu:3", 4, TWO) == ("cpu", 3)
    for gpus, why in ((Gpus(), "no CUDA GPU on this host"), (BROKEN, TOO_OLD[:40])):
        assert resolve_devices("auto", 4, gpus) == ("cpu", 4)
        with pytest.raises(ValueError, match=f"devices is 'cuda', but .*{why}"):
            resolve_devices("cuda", 4, gpus)


def cuda(
    monkeypatch: pytest.MonkeyPatch,
    *free_bytes: int,
    apart: Collection[tuple[int, int]] = (),
    start: Callable[[], None] = lambda: None,
) -> None:
    """Makes torch report a GPU for each of ``free_bytes``; pairs in ``apart`` lack peer access."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free_bytes))
    monkeypatch.setattr(torch.cuda, "init", start)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free_bytes[gpu], 1 << 40))
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda one, other: (one, other) not in apart
    )


def test_free_memory_is_reported_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(monkeypatch, 30, 20)
    assert find_gpus().free_bytes == (30, 20)
    assert gpus_for("auto") == gpus_for("cuda") == find_gpus()
    assert gpus_for("cpu:2") == gpus_for("cpu") == Gpus()


def test_gpus_without_peer_access_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(monkeypatch, 1, 1, 1, apart=[(0, 2), (2, 0)])
    assert find_gpus().apart.startswith(
        "GPU 0 cannot reach the memory of GPU 2 (2 of 6 pairs have no peer access)"
    )
    cuda(monkeypatch, 1, 1, 1)
    assert not find_gpus().apart


def test_cuda_initialization_error_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError(f"{TOO_OLD}\nPlease update your GPU driver")

    def count_none() -> int:
        warnings.warn(f"CUDA initialization: {TOO_OLD}", stacklevel=1)
        return 0

    cuda(monkeypatch, 1, 1, start=fail)
    assert find_gpus() == BROKEN
    monkeypatch.setattr(torch.cuda, "device_count", count_none)
    assert find_gpus() == Gpus(problem=f"CUDA initialization: {TOO_OLD}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert find_gpus() == Gpus()


@pytest.mark.skipif(torch.version.cuda is not None, reason="FBGEMM has its CUDA kernels here")
def test_missing_cuda_kernels_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(monkeypatch, 1)
    assert find_gpus().problem == "FBGEMM has no CUDA kernels here: it is fbgemm-gpu-cpu"


def test_tables_of_all_models_count_towards_gpu_memory() -> None:
    held = {"one": [100, 40], "other": [50, 20]}
    check_room(held, Gpus(2, (WORK_BYTES + 150, WORK_BYTES + 60)), SHARDS)
    with pytest.raises(StoreError, match=r"^one, other: 60 bytes of tables do not fit on GPU 1, "):
        check_room(held, Gpus(2, (WORK_BYTES + 150, WORK_BYTES + 59)), SHARDS)


def test_sharding_is_suggested_only_with_several_gpus() -> None:
    for layout in (REPLICAS, SHARDS):
        with pytest.raises(StoreError, match=r"do not fit on GPU 0, .* batches: use more GPUs"):
            check_room({"one": [1]}, Gpus(1, (WORK_BYTES,)), layout)
    with pytest.raises(StoreError, match="batches: divide them by gpu_layout shards"):
        check_room({"one": [1, 1]}, Gpus(2, (WORK_BYTES,) * 2), REPLICAS)


def embedserve_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name.startswith("embedserve.")]


def test_auto_falls_back_to_cpu_if_models_exceed_gpu_memory(
    published: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    version = published(dtype="int8")
    versions = {"one": version, "same": version}
    (nbytes,) = version.plan.served_bytes_per_rank(version.manifest.tables, "cuda")
    enough = Gpus(1, (WORK_BYTES + 2 * nbytes,))
    less = Gpus(1, (WORK_BYTES + 2 * nbytes - 1,))
    for devices in ("auto", "cuda"):
        assert settle_devices(devices, versions, enough) == ("cuda", REPLICAS)
        assert settle_devices(devices, {"one": version}, less) == ("cuda", REPLICAS)
    assert not embedserve_messages(caplog)
    with caplog.at_level(logging.INFO):
        assert settle_devices("auto", versions, less) == ("cpu", "auto")
    (message,) = embedserve_messages(caplog)
    assert f"no GPU is used: one, same: {2 * nbytes:,} bytes of tables do not fit" in message
    with pytest.raises(ValueError, match=r"'cuda', but one, same: .* do not fit on GPU 0"):
        settle_devices("cuda", versions, less)


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (Gpus(), ""),
        (BROKEN, f"no GPU is used: CUDA does not start: {TOO_OLD}"),
        (Gpus(problem=TOO_OLD), f"finds no CUDA GPU on this host: {TOO_OLD}"),
    ],
)
def test_auto_logs_why_gpus_are_not_used(
    published: Publish, caplog: pytest.LogCaptureFixture, gpus: Gpus, message: str
) -> None:
    version = published()
    with caplog.at_level(logging.WARNING):
        assert settle_devices("auto", {"m": version}, gpus, gpu_layout=REPLICAS)[0] == "cpu"
    found = embedserve_messages(caplog)
    assert len(found) == bool(message)
    assert all(message in one for one in found)
    assert settle_devices("cpu:2", {"m": version}, gpus) == ("cpu:2", "auto")
    with pytest.raises(ValueError, match="devices is 'cuda', but "):
        settle_devices("cuda", {"m": version}, gpus)


@pytest.mark.parametrize(
    ("rows", "dim", "message"),
    [
        (2**31, 64, "has 2147483648 rows: on CUDA"),
        (10, 2052, "has 2052 columns on a GPU: FBGEMM's"),
    ],
)
def test_auto_falls_back_to_cpu_if_cuda_kernels_do_not_support_a_table(
    published: Publish, caplog: pytest.LogCaptureFixture, rows: int, dim: int, message: str
) -> None:
    table = TableSpec("large", rows, dim, ("f",), "sum", "float32")
    version = replace(
        published(),
        manifest=Manifest("m", 1, (table,), is_weighted=False),
        plan=Plan(1, {"large": TablePlan("table_wise", (Shard(0, 0, rows, 0, dim),))}, {}),
    )
    with caplog.at_level(logging.WARNING):
        assert settle_devices("auto", {"m": version}, Gpus(1, (1 << 40,)))[0] == "cpu"
    assert f"no GPU is used: table 'large' {message}" in caplog.text


def test_strict_plan_requires_the_planned_number_of_gpus(published: Publish) -> None:
    version = published(sharding="row_wise", world_size=2)
    one = Gpus(1, (1 << 40,))
    assert settle_devices("auto", {"m": version}, one)[0] == "cuda"
    assert settle_devices("auto", {"m": version}, one, strict_plan=True)[0] == "cpu"
    settled = settle_devices("auto", {"m": version}, TWO, strict_plan=True)
    assert settled == ("cuda", SHARDS)  # the stored plan is for SHARDS
    rejection = "for 2 ranks, one for 1 is needed here: refused, as strict_plan asks"
    with pytest.raises(ValueError, match=f"^gpu_layout is 'replicas', but .*{rejection}"):
        settle_devices("auto", {"m": version}, TWO, gpu_layout=REPLICAS, strict_plan=True)


def test_replicas_are_used_if_the_gpu_with_least_memory_fits_all_models(
    published: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    version = published(dtype="int8", sharding="row_wise", world_size=2)
    versions = {"one": version, "same": version}
    whole = 2 * sum(version.plan.served_bytes_per_rank(version.manifest.tables, "cuda"))
    enough = Gpus(2, (1 << 40, WORK_BYTES + whole))
    less = Gpus(2, (1 << 40, WORK_BYTES + whole - 1))
    message = f"one, same: {whole:,} bytes of tables do not fit on GPU 1, which has "
    message += f"{WORK_BYTES + whole - 1:,} free"
    for devices in ("auto", "cuda"):
        assert settle_devices(devices, versions, enough) == ("cuda", REPLICAS)
        assert settle_devices(devices, versions, enough, gpu_layout=SHARDS) == ("cuda", SHARDS)
        with pytest.raises(
            ValueError, match=f"^gpu_layout is 'replicas', but {message}.*by.*shards"
        ):
            settle_devices(devices, versions, less, gpu_layout=REPLICAS)
    assert not embedserve_messages(caplog)
    with caplog.at_level(logging.INFO):
        assert settle_devices("auto", versions, less) == ("cuda", SHARDS)
    (line,) = [one for one in embedserve_messages(caplog) if "planned anew" not in one]
    assert line.startswith(f"no replicas on 2 GPUs: {message}")


def test_gpus_without_peer_access_serve_replicas_or_fall_back_to_cpu(published: Publish) -> None:
    version = published(dtype="int8", sharding="row_wise", world_size=2)
    versions = {"m": version}
    whole = sum(version.plan.served_bytes_per_rank(version.manifest.tables, "cuda"))
    apart = replace(TWO, apart="GPU 0 cannot reach the memory of GPU 1")
    for devices in ("auto", "cuda"):
        assert settle_devices(devices, versions, apart) == ("cuda", REPLICAS)
    with pytest.raises(ValueError, match="devices is 'cuda', but GPU 0 cannot reach"):
        settle_devices("cuda", versions, apart, gpu_layout=SHARDS)
    less = replace(apart, free_bytes=(WORK_BYTES + whole - 1,) * 2)
    assert settle_devices("auto", versions, less) == ("cpu", "auto")
