"""Samples the inputs of a model's goldens: bags of callers' ids, none of them unknown."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.manifest import Manifest
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.ids.id_map import IdMap

EXAMPLES = 16
IDS_PER_BAG_MAX = 8
_SEED = 20240229

MULTIPLES_MAX = 1 << 20
"""Maximum multiples of the modulus, in either direction, between a sampled id and its remainder.

It applies to tables with the rule modulo (the hashing trick). Goldens thereby have large and
negative ids.
"""


def sample_bags(manifest: Manifest, id_maps: Mapping[str, IdMap]) -> Bags:
    """Samples bags; equal manifests and id maps (by table) give equal bags.

    Example 0 has two ids of every feature, which are the first and the last row if ids are row
    numbers. Example 1 is empty. Other examples have 0 to 8 ids per feature, drawn from all of its
    ids. A feature with an empty id map has no ids.
    """
    random = np.random.default_rng(_SEED)
    features = len(manifest.features)
    lengths = random.integers(0, IDS_PER_BAG_MAX + 1, (features, EXAMPLES), dtype=np.int32)
    lengths[:, 0] = 2
    lengths[:, 1] = 0
    maps = [id_maps.get(table.name) for table in manifest.table_per_feature]
    lengths[[id_map is not None and not len(id_map) for id_map in maps]] = 0
    ids = [
        _sample_ids(random, int(length.sum()), rule, rows, id_map)
        for length, rule, rows, id_map in zip(
            lengths, manifest.rule_per_feature, manifest.rows_per_feature, maps, strict=True
        )
    ]
    flat = np.concatenate(ids)
    weights = random.uniform(-1, 2, len(flat)).astype(np.float32) if manifest.is_weighted else None
    return Bags(flat, lengths, weights)


def _sample_ids(
    random: np.random.Generator, count: int, rule: IdRule, rows: int, id_map: IdMap | None
) -> NDArray[np.int64]:
    if id_map is not None:
        return id_map.sample(random, count)[0]
    if rule.rule == "modulo":
        multiples = random.integers(-MULTIPLES_MAX, MULTIPLES_MAX, count)
        return random.integers(0, rule.modulus, count) + multiples * rule.modulus
    ids = random.integers(0, rows, count)
    ids[:2] = 0, rows - 1
    return ids
