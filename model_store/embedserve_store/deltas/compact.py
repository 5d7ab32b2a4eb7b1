"""Publishes a version and the deltas of its line as the next version.

The rows are copied and checked against their checksums, and the deltas are then written over them
in order. At most one file of a delta is in memory. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from embedserve_store.deltas.compact_ids import golden_bags, write_vocabularies
from embedserve_store.deltas.delta_line import DeltaLine, deltas_in_state
from embedserve_store.deltas.signing import KeyFile, trusted_keys
from embedserve_store.errors import StoreError, UnreachableError
from embedserve_store.format.changed_ids import ChangedIds, compose_ids
from embedserve_store.format.coverage import COMPARED
from embedserve_store.format.delta_goldens import DeltaGoldens
from embedserve_store.format.delta_manifest import DELTAS_FOLDER, LINE_SEQ, LinePosition, check_seq
from embedserve_store.format.manifest import FROM_DESCRIPTION, GOLDENS, Manifest
from embedserve_store.format.manifest_checksum import check_sha256
from embedserve_store.format.tables_file import Progress, TablesFile, header_bytes
from embedserve_store.goldens.delta_parity import check_delta_goldens
from embedserve_store.goldens.goldens_file import Goldens, save_goldens
from embedserve_store.goldens.reference_pooling import pool_stored, row_numbers, stored_rows
from embedserve_store.ids.id_map import open_id_maps
from embedserve_store.ids.translate import IdTranslator
from embedserve_store.model_store import ModelStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.plans.host_plan import HostPlan
from embedserve_store.publishing.part_digests import PartDigests
from embedserve_store.publishing.publish import provenance, publish_files
from embedserve_store.publishing.record_event import record_event
from embedserve_store.publishing.tables_writer import write_tables
from embedserve_store.publishing.version_writer import PublishedVersion, finish_version
from embedserve_store.transfer.file_check import IDS, TABLES
from embedserve_store.transfer.receive import TransferProgress
from embedserve_store.writing.small_files import sync


def compact_deltas(
    store: str | os.PathLike[str],
    model: str,
    *,
    version: int | str | None = None,
    seq: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    key: KeyFile | None = None,
    progress: Progress | None = None,
    upload_progress: TransferProgress | None = None,
) -> PublishedVersion:
    """Publishes a version with the deltas after it as the next version of ``model``.

    The line continues: later deltas apply to both versions. Plan, parts and bags of the goldens are
    those of the version; new bags are drawn if an id of theirs was removed. The vocabularies are
    those after the last delta. The goldens' results are pooled from the new rows. If the last delta
    has goldens of its own, the new rows are compared with them.

    Args:
        store: a folder or a URL.
        version: version or alias to begin with. Default: the newest.
        seq: last delta to include. Default: that of the alias, if ``version`` is one that has a
            delta, else the last of the line.
        cache: folder into which the version of a remote store is pulled. Default: that of
            ModelStore.
        key: PEM file with the Ed25519 public keys that may have signed a delta. Default: signatures
            are not verified.
        progress: callback for each block of rows that is copied.

    Raises:
        StoreError: there is no such version or delta, nothing to compact, or delta ``seq`` was
            undone, also meanwhile. Or the version or a delta is damaged, the rows do not give the
            results of the last delta's goldens, a signature is missing or wrong, or the store
            cannot be written. No version appears then.
    """
    models = ModelStore(store, cache)
    base = models.load(model, version)
    seq = base.at_seq if seq is None else seq
    line = DeltaLine(models, base.manifest, trusted_keys(key) if key else None)
    if seq is not None:
        check_seq(seq, f"{models.where}/{model}/{DELTAS_FOLDER}/{line.start.line}")
    number = base.manifest.version
    if seq is not None and seq <= line.start.seq:
        raise StoreError(
            f"{models.where}/{model}: seq is {seq}, but version {number} has the deltas up to "
            f"{line.start.seq}: nothing to compact"
        )
    if not line.seqs():
        raise StoreError(
            f"{models.where}/{model}: there is no delta after version {number}: nothing to compact"
        )
    undos = _LaterUndos(line)
    nbytes = base.manifest.nbytes + sum(one.nbytes for one in base.id_maps.values())
    made = publish_files(
        models.where,
        model,
        nbytes,
        lambda staging: _write(base, line, undos, seq, staging, progress),
        upload_progress,
        lambda made: undos.check(made.manifest.source[LINE_SEQ]),
    )
    last = made.manifest.source[LINE_SEQ]
    source = f"version {number}, deltas up to {last}"
    record_event(models.where, "compact", model, (made.version,), source=source)
    return made


def _write(
    base: ModelVersion,
    line: DeltaLine,
    undos: _LaterUndos,
    seq: int | None,
    staging: Path,
    progress: Progress | None,
) -> PublishedVersion:
    path = staging / TABLES
    _copy_tables(base, path, progress)
    position, goldens, ids = _apply(line, undos, seq, path, base.manifest)
    tables = TablesFile.open(path, base.manifest.tables)
    if goldens is not None:
        where = f"delta {position.seq} of line {position.line}"
        check_delta_goldens(goldens, base.manifest, partial(stored_rows, tables), where)
    specs = write_vocabularies(base, ids, staging)
    checksums, parts = _checksums(tables, base.plan.hosts)
    specs = tuple(replace(one, sha256=checksums[one.name]) for one in specs)
    source = {key: value for key, value in base.manifest.source.items() if key != COMPARED}
    source |= provenance("deltas") | {GOLDENS: FROM_DESCRIPTION} | position.to_source()
    manifest = replace(base.manifest, tables=specs, source=source, part_checksums=parts)
    shutil.copyfile(base.path / "plan.json", staging / "plan.json")
    _write_goldens(base, manifest, tables, staging / "goldens.safetensors")
    undos.check(position.seq)  # minutes after the first check
    return finish_version(manifest, base.plan, staging, {}, ())


def _copy_tables(base: ModelVersion, path: Path, progress: Progress | None) -> None:
    """Copies the rows, and raises StoreError if they have changed since they were published."""
    tables = base.manifest.tables
    found = write_tables(path, tables, lambda one: base.tables.blocks(one.name), progress)
    for table in tables:
        check_sha256(found[table.name], table.sha256, f"{base.tables.path}: table {table.name!r}")


def _checksums(
    tables: TablesFile, hosts: HostPlan | None
) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Returns the SHA-256 of each table, and those of the rows of each part, by table."""
    checksums, parts = {}, None if hosts is None else PartDigests(hosts)
    for name in tables.tables:
        digest = hashlib.sha256()
        for block in tables.blocks(name):
            digest.update(block.data)
            if parts is not None and parts.is_divided(name):
                parts.update(name, block)
        checksums[name] = digest.hexdigest()
    return checksums, {} if parts is None else parts.checksums(checksums)


def _apply(
    line: DeltaLine, undos: _LaterUndos, seq: int | None, path: Path, manifest: Manifest
) -> tuple[LinePosition, DeltaGoldens | None, dict[str, ChangedIds]]:
    """Writes the rows of the deltas up to ``seq`` into the file.

    Rows of deltas that were undone are left out.

    Returns:
        The position after the last delta, the goldens of that delta, and the changed ids by table.
    """
    deltas, position, goldens = {}, line.start, None
    for delta, after in line.deltas(seq):
        # Goldens may be far larger than the rest, and only the last ones are compared.
        deltas[delta.seq] = replace(delta, goldens=None)
        position, goldens = after, delta.goldens
    undos.check(position.seq)
    data = np.memmap(path, np.uint8, "r+", offset=len(header_bytes(manifest.tables)))
    offsets = TablesFile.open(path, manifest.tables).offsets
    applied = [*deltas_in_state(position.seq, line.start.seq, deltas.__getitem__)][::-1]
    for delta in applied:
        for changes in line.rows(delta):
            for change in changes:
                start, table = offsets[change.table.name], change.table
                rows = data[start : start + table.nbytes].reshape(-1, table.row_bytes)
                rows[change.numbers] = change.values
    data.flush()
    sync(path)
    return position, goldens, compose_ids(line.ids(delta) for delta in applied)


class _LaterUndos:
    """Looks for undos of deltas that are compacted. Each later delta is read once."""

    def __init__(self, line: DeltaLine) -> None:
        self._line = line
        self._seen = line.start.seq

    def check(self, last: int) -> None:
        """Lists the line again, and raises StoreError if a delta after ``last`` reverts to rows
        before it.

        The version could not follow its line past that delta.
        """
        for seq in self._line.seqs():
            if seq <= max(last, self._seen):
                continue
            try:
                delta, _ = self._line.manifest(seq)
            except UnreachableError:
                raise
            except StoreError:
                return  # no delta after a damaged one is applied
            if delta.reverts_to is not None and delta.reverts_to < last:
                raise StoreError(
                    f"delta {last} of line {delta.line} was undone: delta {seq} reverts to "
                    f"{delta.reverts_to}; compact up to {delta.reverts_to}, or {seq} or later"
                )
            self._seen = seq


def _write_goldens(base: ModelVersion, manifest: Manifest, tables: TablesFile, path: Path) -> None:
    id_maps = open_id_maps(path.parent / IDS, manifest.tables)
    bags = golden_bags(base, manifest, id_maps)
    numbers = row_numbers(bags, IdTranslator(manifest, id_maps))
    answers = pool_stored(manifest, bags, numbers, tables)
    save_goldens(Goldens(bags, answers, answers), path)
    sync(path)
