"""Publishes a sharded model from its training job, as a collective of all ranks.

The ranks write their shards of the tables as a checkpoint beside the versions. Rank 0 publishes
from the checkpoint, which is then removed. No rank gathers a table. Imports torch only when called.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.plan import Plan
from embedserve_store.plans.sharding_types import AUTO
from embedserve_store.publishing.options import PublishOptions, check_option_names
from embedserve_store.publishing.publish import as_store_error, check_options, publish
from embedserve_store.publishing.publish_source import Choice
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
    **options: Unpack[PublishOptions],
) -> PublishedVersion | None:
    """Publishes the tables of a sharded ``module`` as the next version of ``model``.

    All ranks of the process group call this function with the same arguments. All see the same
    ``store``, which needs room for the tables twice.

    Args:
        module: a DistributedModelParallel, or any module that holds a sharded
            EmbeddingBagCollection or EmbeddingCollection.
        options: see `PublishOptions`. Without ``sharding``, tables are sharded as in training, over
            other ranks if ``world_size`` differs.

    Returns:
        The published version on rank 0, None on the other ranks.

    Raises:
        InvalidModelError: on all ranks, before anything is written. A URL is also rejected, because
            the ranks save their shards in the store.
        StoreError: on all ranks, in the cases of ``publish``. A layout that differs from the
            previous version's is found only after the shards were saved.
    """
    from embedserve_store.sources.live_dmp import describe_sharded

    check_option_names(options)
    if is_url(os.fspath(store)):
        raise InvalidModelError(
            f"{store}: the ranks save their shards in the store, so publish into a folder that all "
            "of them see, then upload the version (embedserve_store.remote.upload.upload_version)"
        )
    tables, is_weighted, prefix = describe_sharded(module, options.get("prefix", ""))
    sharding = _sharding_of(options, tables, module)
    # The options are the same on every rank, so all ranks raise and none waits for the others.
    check_options(
        tables,
        store,
        model=model,
        dtype=options.get("dtype") or "float32",
        sharding=sharding,
        world_size=options.get("world_size"),
        hosts=options.get("hosts"),
    )
    description = Description(tables, is_weighted)
    options = {**options, "prefix": prefix, "sharding": sharding}
    with ExitStack() as stack:
        shards = _shared_folder(stack, Path(store) / model)
        return _save_and_publish(module, shards, store, model, description, options)


def _shared_folder(stack: ExitStack, folder: Path) -> Path:
    """Returns, on all ranks, a new folder for the shards, which rank 0 removes at the end.

    It is locked and hidden. If this publisher dies, the next publisher removes it.
    """
    problem, name = "", ""
    if rank() == 0:
        try:
            with as_store_error(folder):
                name = stack.enter_context(staging_folder(folder)).name
        except StoreError as error:
            problem = str(error)
    _raise_from_first_rank(problem)
    return folder / _from_first_rank(name)


def _save_and_publish(
    module: torch.nn.Module,
    shards: Path,
    store: str | os.PathLike[str],
    model: str,
    description: Description,
    options: PublishOptions,
) -> PublishedVersion | None:
    """Saves this rank's shards. Rank 0 then publishes them and returns the version."""
    from embedserve_store.sources.live_dmp import save_tables

    published, problem = None, ""
    try:
        with as_store_error(Path(store) / model):
            save_tables(module, shards, options["prefix"])
            if rank() == 0:
                published = publish(shards, store, model=model, tables=description, **options)
    except StoreError as error:
        problem = str(error)
    _raise_from_first_rank(problem)
    return published


def _sharding_of(
    options: PublishOptions, tables: tuple[TableSpec, ...], module: torch.nn.Module
) -> Choice | Plan:
    """Returns the sharding in ``options``; without one, the training plan of ``module``."""
    from embedserve_store.plans.planner_request import own_constraints
    from embedserve_store.sources.live_dmp import plan_of

    sharding = options.get("sharding")
    if sharding is not None:
        return sharding
    plan = plan_of(module, options.get("prefix", ""))
    is_kept = options.get("world_size") in (None, plan.world_size)
    if is_kept and not options.get("constraints"):
        return plan
    types = {name: table.sharding_type for name, table in plan.tables.items()}
    constrained = own_constraints(tables, options.get("constraints") or {})
    allowed = {name: AUTO for name, one in constrained.items() if one.sharding_types}
    return types | allowed


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
