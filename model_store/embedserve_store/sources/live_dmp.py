"""A sharded model as a source: its tables' description, and their shards saved as a checkpoint.

Every rank saves its own shards with torch.distributed.checkpoint and nobody gathers a table.
Knows nothing of the store, and changes nothing in the model.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.plan import Plan
from embedserve_store.sources.checkpoint import table_keys
from embedserve_store.sources.live import check_ids_unchanged, table_of
from embedserve_store.sources.prefix import at_prefix, shown
from embedserve_store.sources.rows import TensorRows
from embedserve_store.sources.rows import checksums_of as checksums_of_rows

if TYPE_CHECKING:
    import torch

_COUNTS = ("iter", "iter_cpu", "step")
"""Of FBGEMM's kernels, which count each call as a step of training."""


def describe_sharded(
    module: torch.nn.Module, prefix: str = ""
) -> tuple[tuple[TableSpec, ...], bool, str]:
    """The tables of the sharded collection in ``module`` in their order, as float32.

    Args:
        module: a DistributedModelParallel, or any module that holds a sharded
            EmbeddingBagCollection or EmbeddingCollection, or is one.
        prefix: only those of the collections that it means (prefix.py) count.

    Returns:
        The tables, whether callers pass weights, and the path of the collection in the state
        dict, "" for ``module`` itself.

    Raises:
        InvalidModelError: there is no sharded collection, or several, or one whose ids another
            module changes first, or a table has a setting that the store does not keep.
    """
    path, collection = _chosen(module, prefix)
    check_ids_unchanged(_unwrapped(module), path)
    is_pooled = hasattr(collection, "_embedding_bag_configs")
    configs: Any = collection._embedding_bag_configs if is_pooled else collection._embedding_configs
    return tuple(map(table_of, configs)), is_pooled and bool(collection._is_weighted), path


@contextlib.contextmanager
def asked_apart(module: torch.nn.Module, prefix: str = "") -> Iterator[Any]:
    """A twin of the sharded collection in ``module`` over the same tables, to ask something of it
    that its training is not to notice.

    The first batch tells a sharded collection in which order features come: the twin has yet to
    learn it. What the tables' kernels count of their calls is put back in the end.
    """
    collection = collection_of(module, prefix)
    twin = copy.copy(collection)
    twin.__dict__ = {
        name: copy.copy(value) if isinstance(value, dict | list) else value
        for name, value in collection.__dict__.items()
        if name != "forward"  # that of a pipeline, which looks ahead
    }
    twin.__dict__.update(
        _has_uninitialized_input_dist=True,
        _has_features_permute=True,
        _input_dists=[],
        _feature_splits=[],
        _features_order=[],
    )
    counts = [
        (kernel, name, copy.deepcopy(getattr(kernel, name)))
        for lookup in collection._lookups  # a list, which modules() does not look into
        for kernel in lookup.modules()
        for name in _COUNTS
        if hasattr(kernel, name)
    ]
    try:
        yield twin
    finally:
        for kernel, name, count in counts:
            setattr(kernel, name, count)


def collection_of(module: torch.nn.Module, prefix: str = "") -> Any:
    """The sharded collection that describe_sharded describes."""
    return _chosen(module, prefix)[1]


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether a sharded collection is in ``module``."""
    return any(True for _ in _collections(module))


def rank() -> int:
    """Of this process; 0 where it is alone."""
    from torch import distributed

    return distributed.get_rank() if distributed.is_initialized() else 0


def plan_of(module: torch.nn.Module, prefix: str = "") -> Plan:
    """How the tables of the sharded collection in ``module`` lie over its ranks.

    Raises:
        InvalidModelError: as describe_sharded, or a table is sharded in a way that is not served.
    """
    from embedserve_store.plans.planner import from_torchrec

    tables, _, _ = describe_sharded(module, prefix)
    collection = collection_of(module, prefix)
    return from_torchrec(collection.module_sharding_plan, tables, collection._env.world_size)


def save_tables(module: torch.nn.Module, folder: str | os.PathLike[str], prefix: str = "") -> None:
    """Saves the tables of ``module`` under ``prefix``, and nothing else, as a checkpoint.

    A collective: all ranks of the default process group call it, with one ``folder`` that all
    of them see.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    state = module.state_dict()
    tables = {one.key: state[one.key] for one in table_keys(state, prefix)}
    save(tables, checkpoint_id=os.fspath(folder))


def checksums_of(module: torch.nn.Module, prefix: str = "") -> dict[str, NDArray[np.uint64]]:
    """Returns by table of ``module`` under ``prefix`` the checksum of each row (row_checksums.py).

    A collective: each rank adds up its own shards, and the ranks their sums.

    Raises:
        InvalidModelError: a table is sharded in a way whose shards are not known.
    """
    import torch
    from torch import distributed

    state = module.state_dict()
    found = {}
    for one in sorted(table_keys(state, prefix), key=lambda key: key.name):
        sums = np.zeros(state[one.key].shape[0], np.uint64)
        for row, column, shard in _own_shards(one.name, state[one.key]):
            own = sums[row : row + shard.shape[0]]
            own += checksums_of_rows(TensorRows(shard), column)
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            summed = torch.from_numpy(sums.view(np.int64)).to(_collective_device())
            distributed.all_reduce(summed)
            sums = summed.cpu().numpy().view(np.uint64)
        found[one.name] = sums
    return found


def _own_shards(table: str, value: Any) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yields the first row, the first column and the values of each shard that this rank counts."""
    import torch
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.tensor import DTensor

    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            row, column = shard.metadata.shard_offsets
            yield row, column, shard.tensor
    elif isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
        if rank() == 0:  # a replica is on every rank
            yield 0, 0, value
    else:
        raise InvalidModelError(
            f"table {table!r}: the shards of a {type(value).__name__} cannot be read: write "
            "expected answers without rows='all'"
        )


def _collective_device() -> torch.device:
    """Returns where tensors of the default process group's collectives lie."""
    import torch
    from torch import distributed

    is_cuda = "nccl" in str(distributed.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Inside DMP and DDP, whose names do not appear in the keys of a state dict."""
    from torchrec.distributed import DistributedModelParallel

    return module.module if isinstance(module, DistributedModelParallel) else module


def _chosen(module: torch.nn.Module, prefix: str) -> tuple[str, Any]:
    everywhere = dict(_collections(module))
    found = at_prefix(everywhere, prefix)
    if len(found) != 1:
        where = f" under {prefix!r}" if prefix else ""
        paths = ", ".join(shown(found))
        raise InvalidModelError(
            f"{type(module).__name__} has {len(found) or 'no'} sharded EmbeddingBagCollections or "
            f"EmbeddingCollections{where}" + (f", at {paths}: choose one with prefix" * bool(found))
        )
    return found[0], everywhere[found[0]]


def _collections(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    from torchrec.distributed.embedding import ShardedEmbeddingCollection
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

    for path, inner in _unwrapped(module).named_modules():
        if isinstance(inner, (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)):
            yield path, inner
