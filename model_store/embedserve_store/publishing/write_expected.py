"""Writes the outputs of a training model, against which a publisher checks its source.

Runs on a single rank or on all ranks of a sharded training job. Imports torch only when called.
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
    """Writes sampled bags and the outputs of ``module`` for them to ``path``.

    An existing file is replaced. The file is for ``publish(…, expected=path)`` of the module's
    checkpoint. The module is left unchanged.

    Args:
        module: an EmbeddingBagCollection or EmbeddingCollection, or a model that has one. If it is
            sharded, such as a DistributedModelParallel, all ranks of its process group call this
            function and rank 0 writes.
        prefix: as in ``publish``.
        rows: rows that ``publish`` compares. "sampled": the rows of the bags. "all": also a
            checksum of each row, 8 bytes per row.

    Raises:
        InvalidModelError: there is no such collection, or torch cannot compute its outputs.
        OSError: the file cannot be written.
    """
    expected = expected_of(module, prefix, rows)
    if live_dmp.rank() == 0:
        save_expected(expected, path)


def expected_of(module: Any, prefix: str = "", rows: Rows = "sampled") -> Expected:
    """Returns, on every rank, the outputs that ``write_expected`` writes."""
    if rows not in ("sampled", "all"):
        raise InvalidModelError(f"rows is {rows!r}, expected 'sampled' or 'all'")
    if not live_dmp.is_sharded(module):
        collection = live.collection_in(module, prefix)
        live.check_can_answer(collection)
        checksums = live.checksums_of(collection) if rows == "all" else {}
        return _compute(
            collection, live.describe(collection), live.is_weighted(collection), checksums
        )
    tables, is_weighted, path = live_dmp.describe_sharded(module, prefix)
    with live_dmp.side_effect_free_twin(module, path) as collection:
        checksums = live_dmp.checksums_of(module, path) if rows == "all" else {}
        return _compute(collection, tables, is_weighted, checksums)


def _compute(
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
