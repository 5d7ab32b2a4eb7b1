"""Writes the files of one version into a staging folder.

The order is rows, id maps, goldens, plan, manifest. publish.py passes a checked source and a plan,
and staging.py publishes the full folder. At most a few blocks of a table are in memory. Imports
torch only when called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.manifest import CHECKED_FILES, Manifest
from embedserve_store.format.manifest_checksum import sealed_json
from embedserve_store.format.row_layout import encode_rows, unstorable_rows
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.format.tables_file import BLOCK_BYTES, Progress, TablesFile
from embedserve_store.format.version_folder import to_json_bytes
from embedserve_store.goldens.goldens_file import Bags, Goldens, save_goldens
from embedserve_store.goldens.parity import check_answers, check_finite
from embedserve_store.goldens.reference_pooling import pool, pool_stored, row_numbers
from embedserve_store.goldens.row_checksums import row_checksums
from embedserve_store.goldens.sampled_bags import sample_bags
from embedserve_store.ids.id_map import IdMap, write_id_maps
from embedserve_store.ids.translate import IdTranslator
from embedserve_store.plans.plan import Plan
from embedserve_store.publishing.part_digests import PartDigests
from embedserve_store.publishing.pooled_error import PooledError, pooled_error
from embedserve_store.publishing.tables_writer import write_tables
from embedserve_store.sources import live
from embedserve_store.sources.rows import TableRows, source_rows
from embedserve_store.transfer.stored_version import SMALL_FILE_BYTES_MAX
from embedserve_store.writing.small_files import sync, write_synced
from embedserve_store.writing.staging import publish_staged

if TYPE_CHECKING:
    import torch
    from torchrec import EmbeddingBagCollection


@dataclass(frozen=True, repr=False)
class PublishedVersion:
    where: str
    """Folder or URL of the version."""
    version: int
    manifest: Manifest
    plan: Plan
    errors: Mapping[str, PooledError]
    """Errors of the pooled vectors, by table name."""
    skipped: tuple[str, ...]
    """Entries of the state dict or checkpoint that are not described tables."""
    is_new: bool = True
    """False if the newest version has the same content, and nothing was published."""

    def __repr__(self) -> str:
        name = f"{self.manifest.model} version {self.version}"
        return f"<PublishedVersion {name} in {self.where}>"

    @property
    def path(self) -> Path:
        """Folder of the version. Raises ValueError if the version is behind a URL."""
        if "://" in self.where:
            raise ValueError(f"{self.where} is not a folder")
        return Path(self.where)


@dataclass(frozen=True)
class TableSource:
    """Tables of a model with their id rules, and their rows, from which a version is made."""

    kind: str
    tables: tuple[TableSpec, ...]
    is_weighted: bool
    rows: Mapping[str, TableRows]
    ebc: EmbeddingBagCollection | None = None
    """The live module, if it can compute float32 outputs itself."""
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class VersionContent:
    """Content of a version before it is written, without its number and checksums."""

    source: TableSource
    manifest: Manifest
    id_maps: Mapping[str, IdMap]
    plan: Plan
    goldens: tuple[Bags, NDArray[np.float32]] | None
    """Bags, and the training model's outputs for them; None to sample bags."""
    max_error: float | None
    """Largest allowed relative L2 error of a table's pooled vectors; None for no limit."""
    progress: Progress | None
    checksums: Mapping[str, NDArray[np.uint64]] = field(default_factory=dict)
    """Checksums of the training model's rows by table (row_checksums.py). The source's rows must
    have the same checksums."""
    previous: Manifest | None = None
    """Version that is not published again if the content is the same; None to publish anyway."""


def write_version(content: VersionContent, staging: Path) -> PublishedVersion:
    """Writes every file of ``content`` into ``staging`` and renames it to the next version.

    If it is the same as ``content.previous``, nothing is renamed.

    Raises:
        InvalidModelError: a row cannot be stored or is not the training model's, or a table's error
            is larger than allowed.
        OSError: an error of the file system, such as a full disk.
    """
    source = content.source
    manifest = _write_tables(content, staging)
    tables = TablesFile.open(staging / "tables.safetensors", manifest.tables, few_reads=True)
    errors = {t.name: pooled_error(t, source.rows[t.name], tables) for t in manifest.tables}
    if content.max_error is not None:
        check_errors(errors, manifest, content.max_error)
    _write_goldens(content, manifest, tables, staging)
    write_synced(staging / "plan.json", to_json_bytes(content.plan.to_json()))
    return finish_version(manifest, content.plan, staging, errors, source.skipped, content.previous)


def finish_version(
    manifest: Manifest,
    plan: Plan,
    staging: Path,
    errors: Mapping[str, PooledError],
    skipped: tuple[str, ...],
    previous: Manifest | None = None,
) -> PublishedVersion:
    """Writes manifest.json, with the checksums of the other files in ``staging``, and renames
    ``staging`` to the next version.

    Args:
        previous: version that is returned instead, if it has the same content; None for none.

    Raises:
        InvalidModelError: a file is larger than readers accept.
        OSError: an error of the file system.
    """
    for name in CHECKED_FILES:
        _check_size(name, (staging / name).stat().st_size)
    files = {
        name: hashlib.sha256((staging / name).read_bytes()).hexdigest() for name in CHECKED_FILES
    }
    manifest = replace(manifest, files=files)
    if previous is not None and manifest.has_same_content(previous):
        manifest, is_new = previous, False
    else:
        version = publish_staged(staging, lambda number: _write_manifest(staging, manifest, number))
        manifest, is_new = replace(manifest, version=version), True
    return PublishedVersion(
        where=str(staging.parent / str(manifest.version)),
        version=manifest.version,
        manifest=manifest,
        plan=plan,
        errors=errors,
        skipped=skipped,
        is_new=is_new,
    )


def _write_tables(content: VersionContent, staging: Path) -> Manifest:
    """Writes the rows and the id maps, and returns the manifest with their checksums."""
    rows = content.source.rows
    parts = PartDigests(content.plan.hosts) if content.plan.hosts is not None else None
    checksums = write_tables(
        staging / "tables.safetensors",
        content.manifest.tables,
        lambda table: _encoded_blocks(rows[table.name], table, content.checksums.get(table.name)),
        content.progress,
        parts,
    )
    maps = content.id_maps
    map_checksums = write_id_maps(staging / "ids.safetensors", maps) if maps else {}

    def with_checksums(table: TableSpec) -> TableSpec:
        ids = table.ids
        if table.name in map_checksums:
            ids = replace(ids, sha256=map_checksums[table.name])
        return replace(table, sha256=checksums[table.name], ids=ids)

    return replace(
        content.manifest,
        tables=tuple(map(with_checksums, content.manifest.tables)),
        part_checksums=parts.checksums(checksums) if parts is not None else {},
    )


def check_errors(errors: Mapping[str, PooledError], manifest: Manifest, max_error: float) -> None:
    """Raises InvalidModelError if the largest relative L2 error of a table exceeds ``max_error``.

    An error that is not a number, because sums of rows overflow, counts as the largest.
    """

    def size(name: str) -> tuple[bool, float]:
        relative_l2 = errors[name].relative_l2
        return isnan(relative_l2), relative_l2

    worst = max(errors, key=size)
    if not errors[worst].relative_l2 <= max_error:
        dtype = next(table.dtype for table in manifest.tables if table.name == worst)
        raise InvalidModelError(
            f"table {worst!r}: stored as {dtype}, its pooled answers have a relative L2 error of "
            f"{errors[worst].relative_l2:.3g}, more than the {max_error:g} allowed"
        )


def _write_goldens(
    content: VersionContent, manifest: Manifest, tables: TablesFile, staging: Path
) -> None:
    id_maps = content.id_maps
    bags, source_answers = content.goldens or (sample_bags(manifest, id_maps), None)
    numbers = row_numbers(bags, IdTranslator(manifest, id_maps))
    if source_answers is None:
        source_answers = _source_answers(content.source, manifest, bags, numbers)
        check_finite(source_answers, manifest, bags, f"model {manifest.model!r}")
    stored_answers = pool_stored(manifest, bags, numbers, tables)
    goldens = Goldens(bags, source_answers, stored_answers)
    check_answers(stored_answers, goldens, numbers, manifest, tables, f"model {manifest.model!r}")
    save_goldens(goldens, staging / "goldens.safetensors")
    sync(staging / "goldens.safetensors")


def _write_manifest(staging: Path, manifest: Manifest, version: int) -> None:
    data = sealed_json(replace(manifest, version=version).to_json())
    _check_size("manifest.json", len(data))
    write_synced(staging / "manifest.json", data)


def _check_size(name: str, nbytes: int) -> None:
    if nbytes > SMALL_FILE_BYTES_MAX:
        raise InvalidModelError(f"{name}: {nbytes} bytes, the limit is {SMALL_FILE_BYTES_MAX}")


def _source_answers(
    source: TableSource, manifest: Manifest, bags: Bags, numbers: NDArray[np.int64]
) -> NDArray[np.float32]:
    if source.ebc is not None:
        return live.answers(source.ebc, manifest, replace(bags, ids=numbers))
    return pool(manifest, bags, numbers, partial(source_rows, source.rows))


def _encoded_blocks(
    rows: TableRows, table: TableSpec, checksums: NDArray[np.uint64] | None
) -> Iterator[NDArray[np.uint8]]:
    """Yields the stored bytes of a table, block by block.

    Raises:
        InvalidModelError: a row holds NaN, infinity or values beyond its dtype's range, or its
            checksum differs from ``checksums``.
    """
    import torch

    step = max(1, BLOCK_BYTES // (4 * table.embedding_dim))
    for start in range(0, table.num_embeddings, step):
        block = rows.read(start, min(start + step, table.num_embeddings))
        _check_finite(block, table, start)
        if checksums is not None:
            _check_checksums(block, checksums[start : start + len(block)], table, start)
        if block.dtype == torch.bfloat16:
            block = block.float()
        encoded = encode_rows(block, table.dtype)
        if table.dtype != "float32":
            _check_storable(encoded, table, start)
        yield encoded


def _check_checksums(
    block: torch.Tensor, checksums: NDArray[np.uint64], table: TableSpec, start: int
) -> None:
    wrong = np.flatnonzero(row_checksums(block.float().numpy()) != checksums)
    if len(wrong):
        raise InvalidModelError(
            f"expected: row {start + wrong[0]} of table {table.name!r} is not the training model's"
        )


def _check_storable(encoded: NDArray[np.uint8], table: TableSpec, start: int) -> None:
    unstorable = unstorable_rows(encoded, table.dtype)
    if len(unstorable):
        raise InvalidModelError(
            f"table {table.name!r}: row {start + unstorable[0]} holds values too large for "
            f"{table.dtype}"
        )


def _check_finite(block: torch.Tensor, table: TableSpec, start: int) -> None:
    # A NaN or infinity in a block makes the block's sum non-finite. A sum of finite values may
    # overflow too, so a non-finite sum only triggers the full check. The sum is numpy's, because
    # torch's second thread would spin between blocks and take the core that the hash needs.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(block.float().numpy().sum()):
            return
    finite = block.isfinite()
    if finite.all():
        return
    row = int((~finite).any(dim=1).nonzero()[0])
    value = float(block[row][~finite[row]][0])
    raise InvalidModelError(f"table {table.name!r}: row {start + row} holds {value}")
