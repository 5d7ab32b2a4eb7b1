"""Models are sharded over GPUs that are not there, and given their rows: torch's fake tensors have
devices and sizes, and no memory. Nothing is looked up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lookup_cases import unpooled_source
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from unpooled import write_version

from embedserve.engine.sharded import shard
from embedserve.engine.unpooled import shard_unpooled
from embedserve_store import ModelVersion

Publish = Callable[..., ModelVersion]

ALIGNMENT_BYTES = 128
"""FBGEMM's kernels begin each table on a cache line."""


class Operators(TorchFunctionMode):
    """torch's Python method for copying asks for CUDA's device, which a build without CUDA has
    not; its operator, which a fake tensor answers, does not."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_gpus() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), Operators():
        yield


def check_held(kernels: Any, version: ModelVersion) -> None:
    """Each GPU has its rank's rows, in as many bytes as check_room counts."""
    held: Counter[torch.device] = Counter()
    for kernel in kernels:
        assert (kernel.use_cpu, kernel.row_alignment) == (False, 16)
        assert kernel.weight_initialized
        held[kernel.weights_dev.device] += kernel.weights_dev.numel()
    counted = version.plan.served_bytes_per_rank(version.manifest.tables, "cuda")
    shards = sum(len(table.shards) for table in version.plan.tables.values())
    for rank, nbytes in enumerate(counted):
        found = held.pop(torch.device("cuda", rank), 0)
        assert nbytes <= found <= nbytes + ALIGNMENT_BYTES * shards
    assert not held


@pytest.mark.parametrize(
    ("sharding", "dtype", "world_size"),
    [
        ("table_wise", "float32", 1),
        ("table_wise", "int8", 2),
        ("row_wise", "int4", 1),
        ("row_wise", "int8", 4),
        ("column_wise", "float16", 2),
        ("column_wise", "int8", 4),
        ("data_parallel", "int8", 2),
    ],
)
def test_each_gpu_is_given_its_shards(
    published: Publish, sharding: str, dtype: str, world_size: int
) -> None:
    version = published(dtype=dtype, sharding=sharding, world_size=world_size)
    with fake_gpus():
        plain = shard(version, version.plan, "cuda", is_weighted=False)
        weighted = shard(version, version.plan, "cuda", is_weighted=True, rows_of=plain)
    kernels = list(plain.module.tbes_configs())
    check_held(kernels, version)
    for kernel, twin in zip(kernels, weighted.module.tbes_configs(), strict=True):
        assert twin.weights_dev is kernel.weights_dev


@pytest.mark.parametrize(
    ("sharding", "world_size"), [("table_wise", 1), ("row_wise", 2), ("data_parallel", 2)]
)
def test_rows_that_are_not_pooled_too(tmp_path: Path, sharding: str, world_size: int) -> None:
    version = write_version(
        tmp_path, unpooled_source(), dtype="int8", sharding=sharding, world_size=world_size
    )
    with fake_gpus():
        sharded = shard_unpooled(version, version.plan, "cuda")
    check_held(sharded.module.tbes_configs(), version)
