"""Writes what a training model itself answers, for a publisher to be held to.

On one rank or on all ranks of a sharded training. Imports torch only when called.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.goldens.expected import Expected, save_expected
from embedserve_store.goldens.sampled_bags import sample_bags
from embedserve_store.sources import live, live_dmp

if TYPE_CHECKING:
    import torch

Rows = Literal["sampled", "all"]


def write_expected(
    module: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    prefix: str = "",
    rows: Rows = "sampled",
) -> None:
    """Writes sampled bags and what ``module`` answers to them to ``path``, over what is there: for
    ``publish(…, expected=path)`` of its checkpoint. The module is as it was afterwards.

    Args:
        module: an EmbeddingBagCollection or EmbeddingCollection, or a model that has one; sharded,
            such as a DistributedModelParallel, all ranks of its process group call this, and rank 0
            writes.
        prefix: as ``publish``.
        rows: which rows ``publish`` compares: "sampled" for those of the bags, or "all" to
            write a checksum of each row too, 8 bytes a row.

    Raises:
        InvalidModelError: there is no such collection, or torch cannot answer for it.
        OSError: the file cannot be written.
    """
    expected = expected_of(module, prefix, rows)
    if live_dmp.rank() == 0:
        save_expected(expected, path)


def expected_of(module: Any, prefix: str = "", rows: Rows = "sampled") -> Expected:
    """Returns what ``write_expected`` writes, on every rank."""
    if rows not in ("sampled", "all"):
        raise InvalidModelError(f"rows is {rows!r}, expected 'sampled' or 'all'")
    if not live_dmp.is_sharded(module):
        collection = live.collection_in(module, prefix)
        live.check_can_answer(collection)
        checksums = live.checksums_of(collection) if rows == "all" else {}
        return _asked(
            collection, live.describe(collection), live.is_weighted(collection), checksums
        )
    tables, is_weighted, path = live_dmp.describe_sharded(module, prefix)
    with live_dmp.asked_apart(module, path) as collection:
        checksums = live_dmp.checksums_of(module, path) if rows == "all" else {}
        return _asked(collection, tables, is_weighted, checksums)


def _asked(
    collection: Any,
    tables: tuple[TableSpec, ...],
    is_weighted: bool,
    checksums: Mapping[str, NDArray[np.uint64]],
) -> Expected:
    manifest = Manifest("", 0, tables, is_weighted)
    bags = sample_bags(manifest, {})
    answers = live.answers(collection, manifest, bags)
    return Expected(
        manifest.features, manifest.keys, manifest.length_per_key, bags, answers, checksums
    )
