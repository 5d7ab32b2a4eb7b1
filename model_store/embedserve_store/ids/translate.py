"""Translates the ids of a whole batch to row numbers, by the rule of each feature's table.

Takes ids feature-major and returns row numbers in the same order, with a mask of the ids that have
no row. The caller handles these ids: it rejects, skips or counts them. Does not know requests.
Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.format.manifest import Manifest
from embedserve_store.ids.id_index import IdIndex
from embedserve_store.ids.id_map import IdMap

OverrideRows = Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[Any]], None]


@dataclass(frozen=True, slots=True)
class Translation:
    """Rows of a batch's ids."""

    rows: NDArray[np.int64]
    """Row numbers [n]. An unknown id has default_row if its rule has unknown "row", otherwise 0."""
    unknown: NDArray[np.bool_] | None
    """Mask [n], True for ids without a row; None if every id has a row."""


class IdTranslator:
    """Translates the ids of a model's batches to rows, with features in the manifest's order."""

    is_identity: bool
    """Whether every id is a row number or an error. The caller may then check the range instead of
    translating."""
    unknown_per_feature: tuple[str, ...]
    """Handling of unknown ids of each feature: error, skip or row. With the rule modulo no id is
    unknown, and the value is error."""
    id_types: tuple[str, ...]
    """Id type of each feature, int64 or string. String ids are hashed before translation."""
    limits: NDArray[np.uint64]
    """Number of rows of each feature."""

    def __init__(self, manifest: Manifest, id_maps: Mapping[str, IdMap]) -> None:
        """Prepares the translation.

        Args:
            id_maps: id map of each table with the rule map, by table name.
        """
        rules = manifest.rule_per_feature
        self.is_identity = all(rule.rule == "rows" and rule.unknown == "error" for rule in rules)
        self.unknown_per_feature = tuple(rule.unknown for rule in rules)
        self.id_types = tuple(rule.id_type for rule in rules)
        self.limits = np.array(manifest.rows_per_feature, np.uint64)
        self._default_rows = np.array([rule.default_row for rule in rules], np.int64)
        self._is_modulo = np.array([rule.rule == "modulo" for rule in rules])
        self._has_modulo = bool(self._is_modulo.any())
        self._moduli = np.array([max(rule.modulus, 1) for rule in rules], np.int64)
        self._offsets = np.array([rule.offset for rule in rules], np.int64)
        self._groups = _group_maps(manifest, id_maps)

    def translate(
        self,
        ids: NDArray[np.int64],
        ids_per_feature: NDArray[Any],
        override_rows: OverrideRows | None = None,
    ) -> Translation:
        """Returns the rows of ``ids`` [n], which are feature-major and are not modified.

        Args:
            ids_per_feature: number of ids of each feature [features], n in total.
            override_rows: writes other rows [n] over those of ids that have changed since
                publishing; -1 for an id that has been removed.
        """
        rows = ids.copy()
        if self._has_modulo:
            self._take_remainders(rows, ids_per_feature)
        self._look_up(rows, ids_per_feature)
        if override_rows is not None:
            override_rows(ids, rows, ids_per_feature)
        # Read as unsigned, a negative value exceeds every limit. This includes the -1 of an id that
        # a map does not have.
        unknown = rows.view(np.uint64) >= np.repeat(self.limits, ids_per_feature)
        if not unknown.any():
            return Translation(rows, None)
        np.copyto(rows, np.repeat(self._default_rows, ids_per_feature), where=unknown)
        return Translation(rows, unknown)

    def _take_remainders(self, rows: NDArray[np.int64], ids_per_feature: NDArray[Any]) -> None:
        moduli = np.repeat(self._moduli, ids_per_feature)
        where = np.repeat(self._is_modulo, ids_per_feature)
        np.remainder(rows, moduli, out=rows, where=where)
        rows += np.repeat(self._offsets, ids_per_feature)

    def _look_up(self, rows: NDArray[np.int64], ids_per_feature: NDArray[Any]) -> None:
        for group in self._groups:
            counts = ids_per_feature[group.features]
            members = np.repeat(group.is_member, ids_per_feature)
            rows[members] = group.index.rows_of(
                rows[members],
                np.repeat(group.first_buckets, counts),
                np.repeat(group.buckets, counts),
                np.repeat(group.first_slots, counts),
            )


@dataclass(frozen=True, slots=True)
class _MapGroup:
    """Features whose id maps share an index, so that a single lookup serves all of them.

    All maps of a mapped file share an index.
    """

    index: IdIndex
    features: list[int]
    is_member: NDArray[np.bool_]
    """Mask over all features of the model, True for ``features``."""
    first_buckets: NDArray[np.int64]
    """First bucket of each of ``features``; ``buckets`` and ``first_slots`` have the same order."""
    buckets: NDArray[np.uint64]
    first_slots: NDArray[np.int64]


def _group_maps(manifest: Manifest, id_maps: Mapping[str, IdMap]) -> list[_MapGroup]:
    maps = {
        feature: id_maps[table.name]
        for feature, table in enumerate(manifest.table_per_feature)
        if table.ids.rule == "map"
    }
    indexes = {id(one.index): one.index for one in maps.values()}
    return [_group(index, maps, len(manifest.features)) for index in indexes.values()]


def _group(index: IdIndex, maps: dict[int, IdMap], feature_count: int) -> _MapGroup:
    members = {feature: one for feature, one in maps.items() if one.index is index}
    features = sorted(members)
    return _MapGroup(
        index=index,
        features=features,
        is_member=np.isin(np.arange(feature_count), features),
        first_buckets=np.array([members[feature].first_bucket for feature in features], np.int64),
        buckets=np.array([members[feature].buckets for feature in features], np.uint64),
        first_slots=np.array([members[feature].first_slot for feature in features], np.int64),
    )
