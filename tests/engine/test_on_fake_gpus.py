"""Tests of models on fake GPUs: sharded, given their rows, and looked up.

torch's fake tensors have devices and sizes, but no memory.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.conftest import Publish
from lookup_cases import unpooled_source
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from unpooled import write_version

from embedserve.engine.attach_weights import gpu_copies, share_rows
from embedserve.engine.compile import RowLookup, TensorLookup
from embedserve.engine.device_batches import DeviceBatches
from embedserve.engine.sharded import shard_without_rows
from embedserve.engine.unpooled import shard_unpooled_without_rows
from embedserve_store import ModelVersion

ALIGNMENT_BYTES = 128
"""FBGEMM's kernels align each table with a cache line."""
EXAMPLES = 3
TO_ONE_GPU = (
    "fbgemm.all_to_one_device",
    "fbgemm.merge_pooled_embeddings",
    "fbgemm.sum_reduce_to_one",
)
"""FBGEMM's operators that query NVML for the links between GPUs."""


class Operators(TorchFunctionMode):
    """Replaces torch's Python methods for copying and slicing by operators.

    The methods query CUDA's device, which a build without CUDA lacks. Fake tensors support the
    operators.

    Attributes:
        number: value of every number that is read back from a device.
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
            return False  # else torchrec waits for a stream before it reads numbers
        if func is torch.Tensor.item:
            return self.number
        return func(*args, **(kwargs or {}))


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that are called.

    Attributes:
        counts: number of calls by name.
        between: number of tensors copied between devices, by (from, to).
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
            self.between[str(args[0].device), str(result.device)] += 1
        return result


@contextmanager
def fake_gpus() -> Iterator[Operators]:
    with FakeTensorMode(allow_non_fake_inputs=True), Operators() as operators:
        yield operators


def check_copies(sharded: Any, version: ModelVersion) -> None:
    """Checks that each GPU has a group of copies, whose blocks fit into its memory."""
    for group in gpu_copies(sharded, version):
        assert len({copy.target.device for copy in group}) == 1
        for copy in group:
            for first, count in copy.blocks(1 << 20):
                block = torch.empty(count, copy.target.shape[1], dtype=torch.uint8)
                copy.fill(block, first)
                copy.target.narrow(0, first, count).copy_(block)


def check_held(kernels: Any, version: ModelVersion, first_gpu: int = 0) -> None:
    """Checks that each GPU has the rows of its rank, in as many bytes as check_room counts."""
    held: Counter[torch.device] = Counter()
    for kernel in kernels:
        assert (kernel.use_cpu, kernel.row_alignment) == (False, 16)
        assert kernel.weight_initialized
        held[kernel.weights_dev.device] += kernel.weights_dev.numel()
    counted = version.plan.served_bytes_per_rank(version.manifest.tables, "cuda")
    shards = sum(len(table.shards) for table in version.plan.tables.values())
    for rank, nbytes in enumerate(counted):
        found = held.pop(torch.device("cuda", first_gpu + rank), 0)
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
def test_each_gpu_holds_its_shards(
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
def test_each_gpu_holds_its_shards_of_unpooled_tables(
    tmp_path: Path, sharding: str, world_size: int
) -> None:
    version = write_version(
        tmp_path, unpooled_source(), dtype="int8", sharding=sharding, world_size=world_size
    )
    with fake_gpus():
        sharded = shard_unpooled_without_rows(version, version.plan, "cuda")
        check_copies(sharded.module, version)
    check_held(sharded.module.tbes_configs(), version)


def tensor_devices(module: Any) -> set[torch.device]:
    """Returns the devices of all tensors of ``module``."""
    own = [one for part in module.modules() for one in vars(part).values()]
    held = [one for one in own if isinstance(one, torch.Tensor)]
    return {one.device for one in (*held, *module.parameters(), *module.buffers())}


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
def test_replica_holds_all_its_tensors_on_its_own_gpu(published: Publish, sharding: str) -> None:
    """Checks a replica whose rows are copied from the GPU of the first replica."""
    version = published(dtype="int8", sharding=sharding, world_size=1)
    with fake_gpus():
        first = shard_without_rows(version, version.plan, "cuda", is_weighted=False)
        gpu_copies(first.module, version)
        with OperatorCounter() as counter:
            replica, weighted = (
                shard_without_rows(version, version.plan, "cuda", is_weighted=one, first_gpu=1)
                for one in (False, True)
            )
            share_rows(replica.module, first.module)
        share_rows(weighted.module, replica.module)
    assert tensor_devices(first.module) == {torch.device("cuda:0")}
    kernels = list(replica.module.tbes_configs())
    assert counter.between["cuda:0", "cuda:1"] == 2 * len(kernels)  # rows, none from a host
    assert not counter.between["cuda:1", "cuda:0"]
    for one in (replica, weighted):
        assert tensor_devices(one.module) == {torch.device("cuda:1")}
        check_held(one.module.tbes_configs(), version, first_gpu=1)
    for kernel, twin in zip(kernels, weighted.module.tbes_configs(), strict=True):
        assert twin.weights_dev is kernel.weights_dev


def look_up_empty_bags(version: ModelVersion, gpu: int) -> tuple[torch.Tensor, OperatorCounter]:
    """Returns the result of a batch of empty bags, as float16, and the second batch's operators.

    The replica on ``gpu`` looks them up.
    """
    manifest, plan = version.manifest, version.plan
    features, keys, dims = manifest.features, manifest.keys, manifest.length_per_key
    device = torch.device("cuda", gpu)
    with fake_gpus() as operators:
        if manifest.is_pooled:
            sharded = shard_without_rows(
                version, plan, "cuda", is_weighted=False, first_gpu=gpu
            ).module
            gpu_copies(sharded, version)
            lookup: Any = TensorLookup(sharded, features, keys, dims, device, takes_offsets=True)
        else:
            sharded = shard_unpooled_without_rows(version, plan, "cuda", first_gpu=gpu).module
            gpu_copies(sharded, version)
            operators.number = 1  # the first batch has an id of each feature
            lookup = RowLookup(sharded, features, keys, dims[0], device, takes_offsets=True)
            operators.number = 0
        batches = DeviceBatches(manifest, device, plan.world_size, lookup)
        bags = EXAMPLES * len(manifest.features)
        packed = torch.zeros(bags + 1, dtype=torch.int32)
        batches.on_device(packed, bags, 0, as_float16=True)
        with OperatorCounter() as counter:
            result_tensor = batches.on_device(packed, bags, 0, as_float16=True)
    return result_tensor, counter


@pytest.mark.parametrize(
    ("sharding", "gpu"), [("table_wise", 0), ("row_wise", 1), ("column_wise", 1)]
)
def test_single_gpu_lookup_copies_one_buffer_without_querying_gpu_links(
    published: Publish, sharding: str, gpu: int
) -> None:
    """Checks that one GPU divides sums for means and rounds the result itself."""
    version = published(dtype="int8", sharding=sharding, world_size=1)
    result_tensor, counter = look_up_empty_bags(version, gpu)
    assert (result_tensor.device, result_tensor.dtype) == (torch.device("cuda", gpu), torch.float16)
    assert tuple(result_tensor.shape) == (EXAMPLES, sum(version.manifest.length_per_key))
    assert counter.between == {("cpu", f"cuda:{gpu}"): 1}
    assert counter.counts["fbgemm.int_nbit_split_embedding_codegen_lookup_function"] >= 1
    assert not any(counter.counts[name] for name in TO_ONE_GPU)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("gpu", [0, 1])
def test_unpooled_single_gpu_lookup_does_not_query_gpu_links(tmp_path: Path, gpu: int) -> None:
    version = write_version(tmp_path, unpooled_source(), sharding="table_wise", world_size=1)
    result_tensor, counter = look_up_empty_bags(version, gpu)
    assert (result_tensor.device, result_tensor.dtype) == (torch.device("cuda", gpu), torch.float16)
    assert counter.between == {("cpu", f"cuda:{gpu}"): 1}
    assert not any(counter.counts[name] for name in TO_ONE_GPU)
