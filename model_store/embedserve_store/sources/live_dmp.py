"""Reads a sharded model: describes its tables, and saves their shards as a checkpoint.

Every rank saves its own shards with torch.distributed.checkpoint, and no rank gathers a table.
Knows nothing of the store. Changes nothing in the model.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError, StoreError, failed_write
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.plan import Plan
from embedserve_store.sources.checkpoint import table_keys
from embedserve_store.sources.live import check_ids_unchanged, table_of
from embedserve_store.sources.prefix import at_prefix, shown
from embedserve_store.sources.rows import TensorRows
from embedserve_store.sources.rows import checksums_of as checksums_of_rows

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_COUNTS = ("iter", "iter_cpu", "step")
"""Attributes of FBGEMM's kernels that count each call as a training step."""


def describe_sharded(
    module: torch.nn.Module, prefix: str = ""
) -> tuple[tuple[TableSpec, ...], bool, str]:
    """Describes the tables of the sharded collection in ``module``, in their order, as float32.

    Args:
        module: a DistributedModelParallel, or any module that is or holds a sharded
            EmbeddingBagCollection or EmbeddingCollection.
        prefix: selects the collection if there are several (prefix.py).

    Returns:
        The tables, whether callers pass weights, and the path of the collection in the state dict;
        the path is "" for ``module`` itself.

    Raises:
        InvalidModelError: there is no sharded collection, or several, or another module changes the
            collection's ids. Also raised if the store does not support a setting of a table.
    """
    path, collection = _chosen(module, prefix)
    check_ids_unchanged(_unwrapped(module), path)
    is_pooled = hasattr(collection, "_embedding_bag_configs")
    configs: Any = collection._embedding_bag_configs if is_pooled else collection._embedding_configs
    return tuple(map(table_of, configs)), is_pooled and bool(collection._is_weighted), path


@contextlib.contextmanager
def side_effect_free_twin(module: torch.nn.Module, prefix: str = "") -> Iterator[Any]:
    """Yields a twin of the sharded collection in ``module`` that shares its tables.

    The twin computes outputs without side effects on training. A sharded collection learns the
    order of its features from the first batch, and whether batch sizes vary by feature, so the twin
    starts without this state. Its ranks exchange float32 values, also if those of the training
    round them for each other (qcomms). The kernels' call counts are restored at the end.
    """
    collection = collection_of(module, prefix)
    twin = copy.copy(collection)
    twin.__dict__ = {
        name: copy.copy(value) if isinstance(value, dict | list) else value
        for name, value in collection.__dict__.items()
        if name != "forward"  # a pipeline's forward prefetches batches
    }
    twin.__dict__.update(
        _has_uninitialized_input_dist=True,
        _has_features_permute=True,
        _input_dists=[],
        _feature_splits=[],
        _features_order=[],
        _output_dists=list(_own_output_dists(collection)),
        post_lookup_tracker_fn=None,  # TorchRec's delta tracker records training
    )
    counts = [
        (kernel, name, copy.deepcopy(getattr(kernel, name)))
        for lookup in collection._lookups  # a list, which modules() does not traverse
        for kernel in lookup.modules()
        for name in _COUNTS
        if hasattr(kernel, name)
    ]
    try:
        yield twin
    finally:
        for kernel, name, count in counts:
            setattr(kernel, name, count)


def _own_output_dists(collection: Any) -> Iterator[torch.nn.Module]:
    """Yields a new module for each sharding that exchanges the results of the ranks unrounded."""
    by_type = getattr(collection, "_sharding_type_to_sharding", {})  # of an EmbeddingCollection
    for sharding in by_type.values() or collection._embedding_shardings:
        plain = copy.copy(sharding)
        plain._qcomm_codecs_registry = None
        yield plain.create_output_dist(device=collection._device)


def collection_of(module: torch.nn.Module, prefix: str) -> Any:
    """Returns the sharded collection that describe_sharded describes."""
    return _chosen(module, prefix)[1]


def is_sharded(module: torch.nn.Module) -> bool:
    """Returns whether ``module`` is or holds a sharded collection."""
    return any(True for _ in sharded_collections(module))


def rank() -> int:
    """Returns the rank of this process; 0 without a process group."""
    from torch import distributed

    return distributed.get_rank() if distributed.is_initialized() else 0


def plan_of(module: torch.nn.Module, prefix: str = "") -> Plan:
    """Returns the sharding plan of the sharded collection in ``module``.

    Raises:
        InvalidModelError: as in describe_sharded, or serving does not support a table's sharding.
    """
    from torch.distributed import get_process_group_ranks

    from embedserve_store.plans.planner import from_torchrec

    tables, _, _ = describe_sharded(module, prefix)
    collection = collection_of(module, prefix)
    ranks: Sequence[int] = range(collection._env.world_size)
    if (group := getattr(collection._env, "sharding_pg", None)) is not None:  # of a DMPCollection
        ranks = get_process_group_ranks(group)
    return from_torchrec(collection.module_sharding_plan, tables, ranks)


def save_tables(
    module: torch.nn.Module,
    folder: str | os.PathLike[str],
    prefix: str,
    group: ProcessGroup | None = None,
) -> None:
    """Saves the tables of ``module`` under ``prefix``, and nothing else, as a checkpoint.

    This is a collective: all ranks call it, and all see ``folder``.

    Args:
        group: process group of all ranks, in which they wait for one another. Default: the default
            process group.

    Raises:
        StoreError: on all ranks, a rank cannot save its shards. A full disk is a NoRoomError.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(_state_of(module, prefix), checkpoint_id=os.fspath(folder), process_group=group)
    except CheckpointException as error:  # no Exception, so callers would not catch it
        failed, (cause, _) = next(iter(error.failures.items()))
        what = f"{folder}: rank {failed} cannot save its shards"
        if isinstance(cause, OSError):
            raise failed_write(what, cause) from error
        raise StoreError(f"{what}: {cause!r}") from error


def checksums_of(module: torch.nn.Module, prefix: str = "") -> dict[str, NDArray[np.uint64]]:
    """Returns the checksum of each row (row_checksums.py), by table name under ``prefix``.

    This is a collective: each rank sums up its own shards, and an all-reduce adds the ranks' sums.

    Raises:
        InvalidModelError: a table's tensor type has shards that cannot be read.
    """
    import torch
    from torch import distributed

    state = _state_of(module, prefix)
    found = {}
    for one in sorted(table_keys(state), key=lambda key: key.name):
        sums = np.zeros(state[one.key].shape[0], np.uint64)
        for row, column, shard in own_shards(one.name, state[one.key]):
            own = sums[row : row + shard.shape[0]]
            own += checksums_of_rows(TensorRows(shard), column)
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            summed = torch.from_numpy(sums.view(np.int64)).to(_collective_device())
            distributed.all_reduce(summed)
            sums = summed.cpu().numpy().view(np.uint64)
        found[one.name] = sums
    return found


def own_shards(table: str, value: Any) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yields first row, first column and values of each shard that this rank reads.

    Replicated tables are read on rank 0.

    Args:
        value: the table in the model's state dict.

    Raises:
        InvalidModelError: ``value`` is of another tensor type.
    """
    import torch
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.tensor import DTensor

    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            row, column = shard.metadata.shard_offsets
            yield row, column, shard.tensor
    elif isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
        if rank() == 0:
            yield 0, 0, value
    else:
        raise InvalidModelError(
            f"table {table!r}: the shards of a {type(value).__name__} cannot be read: write "
            "expected answers without rows='all', and deltas with push_rows"
        )


def _collective_device() -> torch.device:
    """Returns the device of tensors for collectives of the default process group."""
    import torch
    from torch import distributed

    is_cuda = "nccl" in str(distributed.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def _state_of(module: torch.nn.Module, prefix: str) -> dict[str, Any]:
    """Returns the state dict of the collection, whose keys start with the path that ``_chosen``
    returns. The keys in a state dict of a module around a DistributedModelParallel may differ."""
    path, collection = _chosen(module, prefix)
    state: dict[str, Any] = collection.state_dict(prefix=f"{path}." if path else "")
    return state


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the module inside a DistributedModelParallel.

    The wrappers DMP and DDP do not appear in the keys of a state dict.
    """
    from torchrec.distributed import DistributedModelParallel

    return module.module if isinstance(module, DistributedModelParallel) else module


def _chosen(module: torch.nn.Module, prefix: str) -> tuple[str, Any]:
    everywhere = dict(sharded_collections(module))
    found = at_prefix(everywhere, prefix)
    if len(found) != 1:
        where = f" under {prefix!r}" if prefix else ""
        paths = ", ".join(shown(found or everywhere))
        raise InvalidModelError(
            f"{type(module).__name__} has {len(found) or 'no'} sharded EmbeddingBagCollections or "
            f"EmbeddingCollections{where}"
            + (f", {'' if found else 'but '}at {paths}: choose one with prefix" * bool(paths))
        )
    return found[0], everywhere[found[0]]


def sharded_collections(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the path and the module of each sharded collection in ``module``."""
    from torchrec.distributed.embedding import ShardedEmbeddingCollection
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

    for path, inner in _unwrapped(module).named_modules():
        if isinstance(inner, (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)):
            yield path, inner
