"""Callers' ids of a whole batch become row numbers, by the rule of each feature's table.

Takes ids feature-major and hands on row numbers in the same order, with a mark at each id that
has none. What becomes of those (refused, left out, counted) is the caller's to do. Never looks
at requests, and never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.format.manifest import Manifest
from embedserve_store.ids.id_index import IdIndex
from embedserve_store.ids.id_map import IdMap


@dataclass(frozen=True, slots=True)
class Translation:
    """The rows of a batch's ids."""

    rows: NDArray[np.int64]
    """[n] row numbers; where the id is unknown, default_row under the rule "row", else 0."""
    unknown: NDArray[np.bool_] | None
    """[n], True where the id has no row; None if every id has one."""


class IdTranslator:
    """Turns the ids of one model's batches into row numbers; features in the manifest's order."""

    is_identity: bool
    """Every id is a row number or an error: the caller may check the range and not translate."""
    unknown_per_feature: tuple[str, ...]
    """For each feature what becomes of unknown ids: error, skip or row. With modulo, where no
    id is unknown, error."""
    id_types: tuple[str, ...]
    """For each feature int64 or string; ids of strings come here as their hashes."""
    limits: NDArray[np.uint64]
    """For each feature the number of its rows."""

    def __init__(self, manifest: Manifest, id_maps: Mapping[str, IdMap]) -> None:
        """``id_maps`` holds, by name, the map of each table whose rule is map."""
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

    def translate(self, ids: NDArray[np.int64], ids_per_feature: NDArray[Any]) -> Translation:
        """The rows of ``ids`` [n], which are feature-major: ``ids_per_feature`` [features] says
        how many each feature has, n in all. ``ids`` stays as it is."""
        rows = ids.copy()
        if self._has_modulo:
            self._take_remainders(rows, ids_per_feature)
        self._look_up(rows, ids_per_feature)
        # What is no row number is past every limit once it is read as unsigned, also the -1 of
        # an id that a map lacks.
        unknown = rows.view(np.uint64) >= np.repeat(self.limits, ids_per_feature)
        if not unknown.any():
            return Translation(rows, None)
        rows[unknown] = np.repeat(self._default_rows, ids_per_feature)[unknown]
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
    """Features whose maps lie in one index, as all of a mapped file do: one lookup serves all."""

    index: IdIndex
    features: list[int]
    is_member: NDArray[np.bool_]
    """Of all features."""
    first_buckets: NDArray[np.int64]
    """Of ``features``, as what follows."""
    buckets: NDArray[np.uint64]
    first_slots: NDArray[np.int64]


def _group_maps(manifest: Manifest, id_maps: Mapping[str, IdMap]) -> list[_MapGroup]:
    maps = _map_per_feature(manifest, id_maps)
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


def _map_per_feature(manifest: Manifest, id_maps: Mapping[str, IdMap]) -> dict[int, IdMap]:
    """By position of the feature. Tables that share a feature have equal maps: the first's."""
    return {
        column.feature: id_maps[column.table.name]
        for column in reversed(manifest.columns)
        if column.table.ids.rule == "map"
    }
