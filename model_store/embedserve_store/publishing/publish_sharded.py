"""Publishes a sharded model from its training job, as a collective of all ranks.

The ranks write their shards of the tables as a checkpoint beside the versions. Rank 0 publishes
from the checkpoint, which is then removed. No rank gathers a table. Imports torch only when called.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.sharding_types import AUTO
from embedserve_store.publishing.publish import as_store_error, check_options, publish
from embedserve_store.publishing.version_writer import PublishedVersion
from embedserve_store.remote.remote_store import is_url
from embedserve_store.sources.description import Description
from embedserve_store.sources.live_dmp import rank
from embedserve_store.writing.staging import staging_folder

if TYPE_CHECKING:
    import torch


def publish_sharded(
    module: torch.nn.Module,
    store: str | os.PathLike[str],
    *,
    model: str,
    prefix: str = "",
    **options: Any,
) -> PublishedVersion | None:
    """Publishes the tables of a sharded ``module`` as the next version of ``model``.

    All ranks of the process group call this function with the same arguments. All see the same
    ``store``, which needs room for the tables twice.

    Args:
        module: a DistributedModelParallel, or any module that holds a sharded
            EmbeddingBagCollection or EmbeddingCollection.
        prefix: as in ``publish``.
        options: the options of ``publish`` except ``tables``, which ``module`` itself describes.
            Without ``sharding``, tables are sharded as in training, over other ranks if
            ``world_size`` differs.

    Returns:
        The published version on rank 0, None on the other ranks.

    Raises:
        InvalidModelError: on all ranks, before anything is written. A URL is also rejected, because
            the ranks save their shards in the store.
        StoreError: on all ranks, in the cases of ``publish``. A layout that differs from the
            previous version's is found only after the shards were saved.
    """
    from embedserve_store.sources.live_dmp import describe_sharded, save_tables

    if is_url(os.fspath(store)):
        raise InvalidModelError(
            f"{store}: the ranks save their shards in the store, so publish into a folder that all "
            "of them see, then upload the version (embedserve_store.remote.upload.upload_version)"
        )
    tables, is_weighted, found = describe_sharded(module, prefix)
    options = _with_own_plan(options, tables, module, prefix)
    # The options are the same on every rank, so all ranks raise and none waits for the others.
    check_options(
        tables,
        store,
        model=model,
        dtype=options.get("dtype") or "float32",
        sharding=options["sharding"],
        world_size=options.get("world_size"),
    )
    folder = Path(store) / model
    published, problem, name = None, "", ""
    with ExitStack() as stack:
        if rank() == 0:
            try:
                with as_store_error(folder):
                    # The folder is locked and hidden. If this publisher dies, the next
                    # publisher removes it.
                    name = stack.enter_context(staging_folder(folder)).name
            except StoreError as error:
                problem = str(error)
        _raise_from_first_rank(problem)
        shards = folder / _from_first_rank(name)
        try:
            with as_store_error(folder):
                save_tables(module, shards, found)
                if rank() == 0:
                    described = Description(tables, is_weighted)
                    published = publish(
                        shards, store, model=model, tables=described, prefix=found, **options
                    )
        except StoreError as error:
            problem = str(error)
        _raise_from_first_rank(problem)
    return published


def _with_own_plan(
    options: dict[str, Any], tables: tuple[TableSpec, ...], module: torch.nn.Module, prefix: str
) -> dict[str, Any]:
    """Returns ``options`` with the training plan of ``module`` as sharding if none is given."""
    from embedserve_store.plans.planner_request import own_constraints
    from embedserve_store.sources.live_dmp import plan_of

    if options.get("sharding") is not None:
        return options
    plan = plan_of(module, prefix)
    is_kept = options.get("world_size") in (None, plan.world_size)
    if is_kept and not options.get("constraints"):
        return options | {"sharding": plan}
    types = {name: table.sharding_type for name, table in plan.tables.items()}
    constrained = own_constraints(tables, options.get("constraints") or {})
    allowed = {name: AUTO for name, one in constrained.items() if one.sharding_types}
    return options | {"sharding": types | allowed}


def _raise_from_first_rank(problem: str) -> None:
    """Raises, on every rank, rank 0's error if there is one, else the rank's own error."""
    problem = _from_first_rank(problem) or problem
    if problem:
        raise StoreError(problem)


def _from_first_rank(value: str) -> str:
    """Returns rank 0's ``value`` on every rank."""
    from torch import distributed

    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return value
    values = [value]
    distributed.broadcast_object_list(values)
    return values[0]
