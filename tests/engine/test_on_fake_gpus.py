"""Models are sharded over GPUs that are not there, given their rows and asked: torch's fake tensors
have devices and sizes, and no memory."""

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
from torch.utils._python_dispatch import TorchDispatchMode
from unpooled import write_version

from embedserve.engine.bind import gpu_copies, share_rows
from embedserve.engine.device_batches import DeviceBatches
from embedserve.engine.script import RowLookup, TensorLookup
from embedserve.engine.sharded import shard_without_rows
from embedserve.engine.unpooled import shard_unpooled_without_rows
from embedserve_store import ModelVersion

Publish = Callable[..., ModelVersion]

ALIGNMENT_BYTES = 128
"""FBGEMM's kernels begin each table on a cache line."""
GPU = torch.device("cuda:0")
EXAMPLES = 3
TO_ONE_GPU = (
    "fbgemm.all_to_one_device",
    "fbgemm.merge_pooled_embeddings",
    "fbgemm.sum_reduce_to_one",
)
"""FBGEMM's operators that ask NVML how GPUs are linked."""


class Operators(TorchFunctionMode):
    """torch's Python methods for copying and slicing ask for CUDA's device, which a build without
    CUDA has not; their operators, which a fake tensor answers, do not.

    Attributes:
        number: what every number is that is read back from a device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_(*args, **(kwargs or {}))
        if func is torch.Tensor.__getitem__ and isinstance(args[1], slice):
            return torch.ops.aten.slice.Tensor(args[0], 0, args[1].start, args[1].stop)
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return False  # or torchrec waits for a stream before it reads numbers back
        if func is torch.Tensor.item:
            return self.number
        return func(*args, **(kwargs or {}))


class Called(TorchDispatchMode):
    """Counts operators.

    Attributes:
        counts: by name.
        between: by (from, to): tensors that were brought from one device to another.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.between: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.counts[str(func.overloadpacket)] += 1
        if func is torch.ops.aten._to_copy.default and result.device != args[0].device:
            self.between[args[0].device.type, result.device.type] += 1
        return result


@contextmanager
def fake_gpus() -> Iterator[Operators]:
    with FakeTensorMode(allow_non_fake_inputs=True), Operators() as operators:
        yield operators


def check_copies(sharded: Any, version: ModelVersion) -> None:
    """Each GPU has a group of copies, whose blocks fit into its memory."""
    for group in gpu_copies(sharded, version):
        assert len({copy.target.device for copy in group}) == 1
        for copy in group:
            for first, count in copy.blocks(1 << 20):
                block = torch.empty(count, copy.target.shape[1], dtype=torch.uint8)
                copy.fill(block, first)
                copy.target.narrow(0, first, count).copy_(block)


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
        plain = shard_without_rows(version, version.plan, "cuda", is_weighted=False)
        check_copies(plain.module, version)
        weighted = shard_without_rows(version, version.plan, "cuda", is_weighted=True)
        share_rows(weighted.module, plain.module)
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
        sharded = shard_unpooled_without_rows(version, version.plan, "cuda")
        check_copies(sharded.module, version)
    check_held(sharded.module.tbes_configs(), version)


def ask(version: ModelVersion) -> tuple[torch.Tensor, Called]:
    """What is answered to empty bags, as float16; and what it took, of the second batch."""
    manifest, plan = version.manifest, version.plan
    features, keys, dims = manifest.features, manifest.keys, manifest.length_per_key
    with fake_gpus() as operators:
        if manifest.is_pooled:
            sharded = shard_without_rows(version, plan, "cuda", is_weighted=False).module
            gpu_copies(sharded, version)
            lookup: Any = TensorLookup(sharded, features, keys, dims, GPU, takes_offsets=True)
        else:
            sharded = shard_unpooled_without_rows(version, plan, "cuda").module
            gpu_copies(sharded, version)
            operators.number = 1  # its first batch has an id of each feature
            lookup = RowLookup(sharded, features, keys, dims[0], GPU, takes_offsets=True)
            operators.number = 0
        batches = DeviceBatches(manifest, GPU, plan.world_size, lookup, None)
        bags = EXAMPLES * len(manifest.features)
        packed = torch.zeros(bags + 1, dtype=torch.int32)
        batches.on_device(packed, bags, 0, in_half=True)
        with Called() as called:
            answer = batches.on_device(packed, bags, 0, in_half=True)
    return answer, called


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
def test_one_gpu_is_sent_one_buffer_and_asked_about_no_other(
    published: Publish, sharding: str
) -> None:
    """Means among its tables are divided there, and what it answers is rounded there."""
    version = published(dtype="int8", sharding=sharding, world_size=1)
    answer, called = ask(version)
    assert (answer.device, answer.dtype) == (GPU, torch.float16)
    assert tuple(answer.shape) == (EXAMPLES, sum(version.manifest.length_per_key))
    assert called.between == {("cpu", "cuda"): 1}
    assert called.counts["fbgemm.int_nbit_split_embedding_codegen_lookup_function"] >= 1
    assert not any(called.counts[name] for name in TO_ONE_GPU)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_one_gpu_is_asked_about_no_other_for_rows_that_are_not_pooled(tmp_path: Path) -> None:
    version = write_version(tmp_path, unpooled_source(), sharding="table_wise", world_size=1)
    answer, called = ask(version)
    assert (answer.device, answer.dtype) == (GPU, torch.float16)
    assert called.between == {("cpu", "cuda"): 1}
    assert not any(called.counts[name] for name in TO_ONE_GPU)
