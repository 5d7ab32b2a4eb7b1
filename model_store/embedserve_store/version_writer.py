"""Writes one version: rows, goldens, plan, manifest, in this order, into a staging folder.

Takes a checked source and a plan from publish.py and hands the full folder to staging.py.
Never holds more than one block of a table. Imports torch only when called.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store import live
from embedserve_store.errors import InvalidModelError
from embedserve_store.goldens import (
    Bags,
    Goldens,
    pool,
    pool_stored,
    sample_bags,
    save_goldens,
)
from embedserve_store.layout import encode_rows, unstorable_rows
from embedserve_store.manifest import CHECKED_FILES, Manifest, TableSpec
from embedserve_store.plan import Plan
from embedserve_store.staging import publish_staged, sync, write_synced
from embedserve_store.tables_file import BLOCK_BYTES, Progress, TablesFile, write_tables

if TYPE_CHECKING:
    import torch
    from torchrec import EmbeddingBagCollection


@dataclass(frozen=True)
class PooledError:
    """How far a table's stored rows are from the source, pooled, over the goldens."""

    max_abs: float
    relative: float
    """max_abs over the largest absolute source answer of the table."""


@dataclass(frozen=True)
class PublishedVersion:
    path: Path
    version: int
    manifest: Manifest
    plan: Plan
    errors: Mapping[str, PooledError]
    """For each table."""
    skipped: tuple[str, ...]
    """Entries of the state dict that are not described tables."""


@dataclass(frozen=True)
class Source:
    kind: str
    tables: tuple[TableSpec, ...]
    is_weighted: bool
    weights: Mapping[str, torch.Tensor]
    ebc: EmbeddingBagCollection | None = None
    """The module, where it can give float32 answers itself."""
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Draft:
    """All of a version but its number and what writing it tells."""

    source: Source
    manifest: Manifest
    plan: Plan
    progress: Progress | None


def write_version(draft: Draft, staging: Path) -> PublishedVersion:
    """Writes every file of ``draft`` into ``staging`` and renames it to the next version.

    Raises:
        InvalidModelError: a table has a row that cannot be stored.
        OSError: as the file system says, for instance when the disk is full.
    """
    source, manifest = draft.source, draft.manifest
    bags = sample_bags(manifest)
    source_answers = _source_answers(source, manifest, bags)
    tables_path = staging / "tables.safetensors"
    checksums = write_tables(
        tables_path, manifest.tables, lambda table: _encoded_blocks(source, table), draft.progress
    )
    stored_answers = pool_stored(manifest, bags, TablesFile.open(tables_path, manifest.tables))
    save_goldens(Goldens(bags, source_answers, stored_answers), staging / "goldens.safetensors")
    sync(staging / "goldens.safetensors")
    write_synced(staging / "plan.json", _json(draft.plan.to_json()))
    manifest = replace(
        manifest,
        tables=tuple(replace(table, sha256=checksums[table.name]) for table in manifest.tables),
        files={name: _sha256(staging / name) for name in CHECKED_FILES},
    )
    version = publish_staged(staging, lambda number: _write_manifest(staging, manifest, number))
    return PublishedVersion(
        path=staging.parent / str(version),
        version=version,
        manifest=replace(manifest, version=version),
        plan=draft.plan,
        errors=_pooled_errors(manifest, source_answers, stored_answers),
        skipped=source.skipped,
    )


def _write_manifest(staging: Path, manifest: Manifest, version: int) -> None:
    write_synced(staging / "manifest.json", _json(replace(manifest, version=version).to_json()))


def _json(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _source_answers(source: Source, manifest: Manifest, bags: Bags) -> NDArray[np.float32]:
    if source.ebc is not None:
        return live.answers(source.ebc, manifest, bags)

    import torch

    def rows_of(table: TableSpec, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        weight = source.weights[table.name].detach()
        rows = weight[torch.from_numpy(ids).to(weight.device)]
        result: NDArray[np.float32] = rows.float().cpu().numpy()
        return result

    return pool(manifest, bags, rows_of)


def _encoded_blocks(source: Source, table: TableSpec) -> Iterator[NDArray[np.uint8]]:
    """The table's stored bytes, block by block.

    Raises:
        InvalidModelError: a row holds NaN or infinity, or values that its dtype cannot hold.
    """
    weight = source.weights[table.name].detach()
    step = max(1, BLOCK_BYTES // (table.embedding_dim * weight.element_size()))
    for start in range(0, table.num_embeddings, step):
        block = weight[start : start + step].cpu()
        _check_finite(block, table, start)
        encoded = encode_rows(block, table.dtype)
        unstorable = unstorable_rows(encoded, table.dtype)
        if len(unstorable):
            raise InvalidModelError(
                f"table {table.name!r}: row {start + unstorable[0]} holds values too large for "
                f"{table.dtype}"
            )
        yield encoded


def _check_finite(block: torch.Tensor, table: TableSpec, start: int) -> None:
    finite = block.isfinite()
    if finite.all():
        return
    row = int((~finite).any(dim=1).nonzero()[0])
    value = float(block[row][~finite[row]][0])
    raise InvalidModelError(f"table {table.name!r}: row {start + row} holds {value}")


def _pooled_errors(
    manifest: Manifest, source: NDArray[np.float32], stored: NDArray[np.float32]
) -> dict[str, PooledError]:
    errors = {}
    for table, group in groupby(manifest.columns, lambda columns: columns.table):
        keys = list(group)
        block = slice(keys[0].start, keys[-1].end)
        max_abs = float(np.abs(stored[:, block] - source[:, block]).max())
        largest = float(np.abs(source[:, block]).max())
        errors[table.name] = PooledError(max_abs, max_abs / largest if largest else 0.0)
    return errors
