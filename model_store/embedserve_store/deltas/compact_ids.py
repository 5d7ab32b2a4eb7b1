"""Writes the vocabularies of a version that is compacted. Imports no torch."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from embedserve_store.format.changed_ids import ChangedIds
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.goldens.sampled_bags import sample_bags
from embedserve_store.ids.id_map import IdMap, check_id_maps, open_id_maps, write_id_maps
from embedserve_store.ids.string_hashes import hash_strings
from embedserve_store.ids.translate import IdTranslator
from embedserve_store.model_version import ModelVersion
from embedserve_store.transfer.file_check import IDS


def write_vocabularies(
    base: ModelVersion, changed: Mapping[str, ChangedIds], staging: Path
) -> tuple[TableSpec, ...]:
    """Writes the vocabularies of ``base`` with the changed ids, by table, into ``staging``.

    Returns:
        The tables, whose rules have the numbers and checksums of the ids.

    Raises:
        StoreError: the vocabularies have changed since they were published.
        OSError: the file cannot be written.
    """
    tables = base.manifest.tables
    if not base.id_maps:
        return tables
    path = staging / IDS
    if not changed:
        shutil.copyfile(base.path / IDS, path)
        check_id_maps(open_id_maps(path, tables), tables, path)
        return tables
    check_id_maps(base.id_maps, tables, base.path / IDS)
    maps = {
        name: _with_changes(id_map, changed[name]) if name in changed else id_map
        for name, id_map in base.id_maps.items()
    }
    checksums = write_id_maps(path, maps)
    return tuple(
        _with_rule(table, maps[table.name], checksums[table.name]) if table.name in maps else table
        for table in tables
    )


def golden_bags(base: ModelVersion, manifest: Manifest, id_maps: Mapping[str, IdMap]) -> Bags:
    """Returns the bags of the version's goldens, or new ones if an id of theirs was removed."""
    bags = base.goldens().bags
    translator = IdTranslator(manifest, id_maps)
    if translator.translate(bags.ids, bags.lengths.sum(axis=1)).unknown is None:
        return bags
    return sample_bags(manifest, id_maps)


def _with_changes(id_map: IdMap, changed: ChangedIds) -> IdMap:
    is_same = ~np.isin(id_map.ids, changed.ids)
    has_row = changed.rows >= 0
    ids = np.concatenate([id_map.ids[is_same], changed.ids[has_row]])
    rows = np.concatenate([id_map.rows[is_same].astype(np.int64), changed.rows[has_row]])
    return IdMap.build(ids, rows, changed.table.name)


def _with_rule(table: TableSpec, id_map: IdMap, sha256: str) -> TableSpec:
    examples = table.ids.examples
    if examples:
        is_there = id_map.rows_of(hash_strings(examples)) >= 0
        examples = tuple(one for one, there in zip(examples, is_there, strict=True) if there)
    rule = replace(table.ids, entries=len(id_map), sha256=sha256, examples=examples)
    return replace(table, ids=rule)
