"""Helpers that publish a state dict with the results of its training model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pooled import collection
from store.listing import everything_under
from torchrec import EmbeddingBagCollection, PoolingType

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.goldens.expected import Expected
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.publishing.publish import publish
from embedserve_store.sources import live


def twins() -> EmbeddingBagCollection:
    """Returns a collection of two tables with the same shape."""
    torch.manual_seed(3)
    return collection([(name, 40, 8, [name], PoolingType.SUM) for name in "ab"])


def state_of(module: torch.nn.Module) -> dict[str, Any]:
    return {f"m.ebc.{key}": value for key, value in module.state_dict().items()}


def described(module: Any, **changes: dict[str, Any]) -> Sequence[TableSpec]:
    """Returns the tables of ``module``, with the fields of ``changes`` by table name."""
    return [replace(table, **changes.get(table.name, {})) for table in live.describe(module)]


def publish_state(
    module: torch.nn.Module, store: Path, tables: Sequence[TableSpec], **options: Any
) -> str:
    """Publishes; returns the error, "" if there is none. After an error the store is unchanged."""
    before = everything_under(store)
    try:
        publish(state_of(module), store, model="m", tables=tables, **options)
    except InvalidModelError as error:
        assert everything_under(store) == before
        return str(error)
    return ""


def expected_results_of(
    module: EmbeddingBagCollection, lengths: list[list[int]], weight: float | None = None
) -> Expected:
    """Returns the results of ``module`` for bags of these lengths. The ids of each feature are 0,
    1, 2, … modulo 40."""
    manifest = Manifest("", 0, live.describe(module), weight is not None)
    ids = np.concatenate([np.arange(sum(one), dtype=np.int64) % 40 for one in lengths])
    weights = None if weight is None else np.full(len(ids), weight, np.float32)
    bags = Bags(ids, np.array(lengths, np.int32), weights)
    answers = live.answers(module, manifest, bags)
    return Expected(manifest.features, manifest.keys, manifest.length_per_key, bags, answers)
