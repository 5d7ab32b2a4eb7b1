"""Publishes a model: checks it, plans its shards, has it written, and reports.

``publish`` takes a live EmbeddingBagCollection, ``publish_state_dict`` a checkpoint's weights
and a description of them; from there both go the same way. Whatever fails, no version appears
and nothing is left behind. Imports torch only when called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedserve_store import live, sources
from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.manifest import (
    NAME_PATTERN,
    Manifest,
    TableSpec,
    check_table,
    check_tables,
)
from embedserve_store.staging import check_writable, staging_folder
from embedserve_store.tables_file import Progress
from embedserve_store.version_writer import Draft, PublishedVersion, Source, write_version

if TYPE_CHECKING:
    from torchrec import EmbeddingBagCollection

Choice = str | Mapping[str, str]
"""One name for all tables, or a mapping from table to name that names every table."""


def publish(
    ebc: EmbeddingBagCollection,
    store: str | os.PathLike[str],
    *,
    model: str,
    dtype: Choice = "float32",
    sharding: Choice = "table_wise",
    world_size: int = 1,
    progress: Progress | None = None,
) -> PublishedVersion:
    """Publishes a live, unsharded EmbeddingBagCollection as the next version of ``model``.

    Args:
        ebc: its weights are float32 or float16, on any device.
        dtype: what rows are stored as: float32, float16, int8 or int4.
        sharding: table_wise or row_wise.
        world_size: ranks to plan for.

    Raises:
        InvalidModelError: the model cannot be published; the store was not touched, or is as
            it was before.
        StoreError: the store cannot be written; it is as it was before.
    """
    tables = _with_dtypes(live.describe(ebc), dtype)
    source = Source(
        kind="embedding_bag_collection",
        tables=tables,
        is_weighted=ebc.is_weighted(),
        weights=live.weights_of(ebc),
        ebc=ebc if live.can_answer(ebc) else None,
    )
    return _publish(source, Path(store), model, sharding, world_size, progress)


def publish_state_dict(
    state_dict: Mapping[str, Any],
    tables: Sequence[TableSpec],
    store: str | os.PathLike[str],
    *,
    model: str,
    is_weighted: bool = False,
    dtype: Choice | None = None,
    sharding: Choice = "table_wise",
    world_size: int = 1,
    progress: Progress | None = None,
) -> PublishedVersion:
    """Publishes the described ``tables`` of a state dict as the next version of ``model``.

    Args:
        state_dict: tables are found by keys that end in ``embedding_bags.<table>.weight``.
        dtype: as for ``publish``; None leaves it as ``tables`` say.

    Raises:
        InvalidModelError, StoreError: as ``publish``.
    """
    described = tuple(tables) if dtype is None else _with_dtypes(tuple(tables), dtype)
    weights, skipped = sources.find_tables(state_dict, described)
    source = Source("state_dict", described, is_weighted, weights, skipped=skipped)
    return _publish(source, Path(store), model, sharding, world_size, progress)


def check_options(
    tables: Sequence[TableSpec],
    store: str | os.PathLike[str],
    *,
    model: str,
    dtype: Choice,
    sharding: Choice,
    world_size: int,
) -> None:
    """Refuses what ``publish`` would refuse before it reads a weight, so that a trainer can ask
    before it trains; touches nothing.

    Raises:
        InvalidModelError, StoreError: as ``publish``.
    """
    from embedserve_store.planner import make_plan

    described = _with_dtypes(tuple(tables), dtype)
    _check_description(described, model)
    make_plan(described, sharding=sharding, world_size=world_size)
    check_writable(Path(store) / model)


def _with_dtypes(tables: tuple[TableSpec, ...], dtype: Choice) -> tuple[TableSpec, ...]:
    names = [table.name for table in tables]
    choice = dict.fromkeys(names, dtype) if isinstance(dtype, str) else dtype
    for name in choice:
        if name not in names:
            raise InvalidModelError(f"dtype names table {name!r}, the model has {names}")
    for name in names:
        if name not in choice:
            raise InvalidModelError(f"dtype does not say how table {name!r} is stored")
    return tuple(replace(table, dtype=choice[table.name]) for table in tables)


def _publish(
    source: Source,
    store: Path,
    model: str,
    sharding: Choice,
    world_size: int,
    progress: Progress | None,
) -> PublishedVersion:
    from embedserve_store.planner import make_plan

    _check_description(source.tables, model)
    for table in source.tables:
        sources.check_weight(table, source.weights[table.name])
    plan = make_plan(source.tables, sharding=sharding, world_size=world_size)
    manifest = Manifest(model, 0, source.tables, source.is_weighted, _provenance(source.kind))
    draft = Draft(source, manifest, plan, progress)
    with _as_store_error(store / model), staging_folder(store / model) as staging:
        return write_version(draft, staging)


def _check_description(tables: tuple[TableSpec, ...], model: str) -> None:
    if not NAME_PATTERN.fullmatch(model):
        raise InvalidModelError(
            f"model name {model!r}: use letters, digits, '_', '-' and '.', "
            "and begin with a letter, digit or '_'"
        )
    try:
        check_tables(tables, f"model {model!r}")
        for table in tables:
            check_table(table, f"table {table.name!r}")
    except StoreError as error:
        raise InvalidModelError(str(error)) from error


def _provenance(kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "published_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: _installed(name) for name in ("torch", "torchrec", "embedserve")},
    }


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@contextmanager
def _as_store_error(folder: Path) -> Iterator[None]:
    """Says in one line what stopped the publisher, also when its user did."""
    try:
        yield
    except StoreError:
        raise
    except KeyboardInterrupt as error:
        raise StoreError(f"{folder}: publishing was interrupted") from error
    except OSError as error:
        file = f" ({error.filename})" if error.filename else ""
        reason = error.strerror or error
        raise StoreError(f"{folder}: publishing failed: {reason}{file}") from error
    except Exception as error:
        raise StoreError(f"{folder}: publishing failed: {error!r}") from error
