"""Makes a TableSource from any kind of model source: a module, a state dict or a checkpoint.

Hands publish.py tables with their rows, which are not yet read. Imports torch only when called.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedserve_store.errors import InvalidModelError, check_tables_known
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.publishing.version_writer import TableSource
from embedserve_store.sources import live
from embedserve_store.sources.checkpoint import find_tables, from_state_dict, open_checkpoint
from embedserve_store.sources.description import Description

if TYPE_CHECKING:
    from torchrec import EmbeddingBagCollection, EmbeddingCollection

Choice = str | Mapping[str, str]
"""A name for all tables, or a mapping from table to name."""

ModelSource = Any
"""A state dict, a path, or a module. The module is or holds an EmbeddingBagCollection or
EmbeddingCollection."""


def make_source(
    source: ModelSource,
    tables: Description | Sequence[TableSpec] | None,
    prefix: str,
    dtype: Choice | None,
    with_vocabulary: Collection[str],
) -> TableSource:
    """Returns a TableSource. Raises InvalidModelError or StoreError as ``publish`` does."""
    if isinstance(source, (str, os.PathLike, Mapping)):
        return _from_checkpoint(source, tables, prefix, dtype, with_vocabulary)
    if tables is not None:
        raise InvalidModelError(
            "tables describe a state dict or a checkpoint; a module describes itself"
        )
    return _from_module(live.collection_in(source, prefix), dtype)


def _from_module(
    module: EmbeddingBagCollection | EmbeddingCollection, dtype: Choice | None
) -> TableSource:
    described = live.describe(module)
    is_pooled = live.is_pooled(module)
    return TableSource(
        kind="embedding_bag_collection" if is_pooled else "embedding_collection",
        tables=described if dtype is None else with_dtypes(described, dtype),
        is_weighted=live.is_weighted(module),
        rows=live.weights_of(module),
        ebc=module if is_pooled and live.can_answer(module) else None,
    )


def _from_checkpoint(
    source: str | os.PathLike[str] | Mapping[str, Any],
    tables: Description | Sequence[TableSpec] | None,
    prefix: str,
    dtype: Choice | None,
    with_vocabulary: Collection[str],
) -> TableSource:
    if tables is None:
        raise InvalidModelError(
            "tables is missing: a state dict or checkpoint holds no features and no pooling"
        )
    described = tuple(tables.tables if isinstance(tables, Description) else tables)
    if isinstance(source, Mapping):
        checkpoint = from_state_dict(source)
    else:
        checkpoint = open_checkpoint(Path(source))
    rows, skipped = find_tables(checkpoint, described, prefix, with_vocabulary)
    return TableSource(
        kind=checkpoint.kind,
        tables=described if dtype is None else with_dtypes(described, dtype),
        is_weighted=tables.is_weighted if isinstance(tables, Description) else False,
        rows=rows,
        skipped=skipped,
    )


def with_dtypes(tables: tuple[TableSpec, ...], dtype: Choice) -> tuple[TableSpec, ...]:
    choice = choice_by_table("dtype", tables, dtype)
    return tuple(replace(table, dtype=choice.get(table.name, table.dtype)) for table in tables)


def choice_by_table(what: str, tables: Sequence[TableSpec], choice: Choice) -> dict[str, str]:
    """Returns the choice by table, for each table that ``choice`` names.

    Raises:
        InvalidModelError: ``choice`` names a table that the model does not have.
    """
    names = [table.name for table in tables]
    if isinstance(choice, str):
        return dict.fromkeys(names, choice)
    check_tables_known(what, choice, names)
    return dict(choice)
