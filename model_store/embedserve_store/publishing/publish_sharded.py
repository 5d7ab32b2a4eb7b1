"""Publishes a sharded model from its training job, as a collective of all ranks.

The ranks write their shards of the tables as a checkpoint beside the versions. Rank 0 publishes
from the checkpoint, which is then removed. No rank gathers a table. Imports torch only when called.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.plan import Plan
from embedserve_store.plans.sharding_types import AUTO
from embedserve_store.publishing.expected_answers import check_expected
from embedserve_store.publishing.options import PublishOptions, check_option_names
from embedserve_store.publishing.publish import as_store_error, check_options, publish
from embedserve_store.publishing.publish_source import Choice
from embedserve_store.publishing.ranks import Ranks
from embedserve_store.publishing.version_writer import PublishedVersion
from embedserve_store.publishing.write_expected import expected_of
from embedserve_store.remote.remote_store import is_url
from embedserve_store.sources.description import Description
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
    check_option_names(options)
    if is_url(os.fspath(store)):
        raise InvalidModelError(
            f"{store}: the ranks save their shards in the store, so publish into a folder that all "
            "of them see, then upload the version (embedserve_store.remote.upload.upload_version)"
        )
    with ExitStack() as stack:
        ranks = Ranks()
        stack.callback(ranks.close)
        # A store may be writable on some ranks only.
        description, options = ranks.on_all(lambda: _resolve_options(module, store, model, options))
        shards = _shared_folder(stack, ranks, Path(store) / model)
        save = partial(_save_and_publish, module, shards, store, model, description, options, ranks)
        return ranks.on_all(save)


def _resolve_options(
    module: torch.nn.Module, store: str | os.PathLike[str], model: str, options: PublishOptions
) -> tuple[Description, PublishOptions]:
    """Returns the tables of ``module``, and ``options`` with its prefix and sharding.

    Raises:
        InvalidModelError, StoreError: as check_options.
    """
    from embedserve_store.sources.live_dmp import describe_sharded

    tables, is_weighted, prefix = describe_sharded(module, options.get("prefix", ""))
    sharding = _sharding_of(options, tables, module)
    check_options(
        tables,
        store,
        model=model,
        dtype=options.get("dtype") or "float32",
        sharding=sharding,
        world_size=options.get("world_size"),
        hosts=options.get("hosts"),
    )
    return Description(tables, is_weighted), {**options, "prefix": prefix, "sharding": sharding}


def _shared_folder(stack: ExitStack, ranks: Ranks, folder: Path) -> Path:
    """Returns, on all ranks, a new folder for the shards, which rank 0 removes at the end.

    It is locked and hidden. If this publisher dies, the next publisher removes it.
    """

    def make() -> str:
        with as_store_error(folder):
            return stack.enter_context(staging_folder(folder)).name

    return folder / ranks.on_first(make)


def _save_and_publish(
    module: torch.nn.Module,
    shards: Path,
    store: str | os.PathLike[str],
    model: str,
    description: Description,
    options: PublishOptions,
    ranks: Ranks,
) -> PublishedVersion | None:
    """Saves this rank's shards. Rank 0 then publishes them and returns the version.

    Without expected answers in ``options``, those of ``module`` itself are compared first. Rows
    that are not pooled are not: TorchRec cannot look these up on several CPU ranks.
    """
    from embedserve_store.sources.checkpoint import find_tables, open_checkpoint
    from embedserve_store.sources.live_dmp import save_tables

    prefix = options["prefix"]
    is_pooled = description.tables[0].pooling != "none"
    is_compared = is_pooled and options.get("expected") is None
    with as_store_error(Path(store) / model):
        own = expected_of(module, prefix) if is_compared else None
        save_tables(module, shards, prefix, ranks.group)
        if ranks.rank == 0:
            if own is not None:
                manifest = Manifest(model, 0, description.tables, description.is_weighted)
                rows, _ = find_tables(open_checkpoint(shards), description.tables, prefix)
                check_expected(own, manifest, rows)
            return publish(shards, store, model=model, tables=description, **options)
    return None


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
