"""Publishes a sharded model from where it trains: a collective of all its ranks.

The ranks write their shards of the tables as a checkpoint beside the versions, the first rank
publishes from it, and it is removed. No rank gathers a table. Imports torch only when called.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedserve_store.errors import StoreError
from embedserve_store.publishing.publish import as_store_error, publish
from embedserve_store.publishing.version_writer import PublishedVersion
from embedserve_store.sources.description import Description

if TYPE_CHECKING:
    import torch

SHARDS = ".shards-"


def publish_sharded(
    module: torch.nn.Module,
    store: str | os.PathLike[str],
    *,
    model: str,
    prefix: str = "",
    **options: Any,
) -> PublishedVersion | None:
    """Publishes the tables of a sharded ``module`` as the next version of ``model``.

    All ranks of its process group call it with the same arguments and see one ``store``, which
    needs room for the tables twice.

    Args:
        module: a DistributedModelParallel, or any module with a sharded EmbeddingBagCollection or
            EmbeddingCollection inside.
        prefix: the path of the collection in ``module``, where there are several.
        options: as ``publish``, except tables.

    Returns:
        On rank 0 what was published, on the others None.

    Raises:
        InvalidModelError, StoreError: on all ranks, as ``publish``.
    """
    from embedserve_store.sources.live_dmp import describe_sharded, save_tables

    tables, is_weighted, found = describe_sharded(module, prefix)
    name = _from_first_rank(f"{SHARDS}{secrets.token_hex(8)}")
    folder = Path(store) / model
    published, problem = None, ""
    try:
        with as_store_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
            save_tables(module, folder / name, found)
            if _rank() == 0:
                description = Description(tables, is_weighted)
                published = publish(
                    folder / name, store, model=model, tables=description, prefix=found, **options
                )
    except StoreError as error:
        problem = str(error)
    problem = _from_first_rank(problem) or problem
    if _rank() == 0:
        shutil.rmtree(folder / name, ignore_errors=True)
    if problem:
        raise StoreError(problem)
    return published


def _rank() -> int:
    from torch import distributed

    return distributed.get_rank() if distributed.is_initialized() else 0


def _from_first_rank(value: str) -> str:
    """What rank 0 gave, on every rank."""
    from torch import distributed

    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return value
    values = [value]
    distributed.broadcast_object_list(values)
    return values[0]
