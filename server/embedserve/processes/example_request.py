"""Example requests for a served model, made from its version's goldens. They are shown at the start
as a command, and on the OpenAPI pages."""

from __future__ import annotations

import numpy as np

from embedserve_store import Bags, IdRule
from embedserve_store.format.manifest import Manifest

EXAMPLES = 2
IDS_MAX = 6
"""Ids in a bag of the example."""
FEATURES_MAX = 32
"""Features in the example; a model with more shows its first ones."""
EXACT_MAX = 2**53 - 1
"""Largest integer that JavaScript, and so a page in a browser, represents exactly. Larger ids are
shown as strings."""

Features = dict[str, list[list[int | str]]]


def example_features(manifest: Manifest, bags: Bags) -> Features:
    """Returns two of the golden examples ``bags``, shortened. They are the examples with ids for
    the most features."""
    fullest = sorted(
        range(bags.lengths.shape[1]),
        key=lambda example: -int(np.count_nonzero(bags.lengths[:, example])),
    )
    rules = zip(manifest.features, manifest.rule_per_feature, strict=True)
    return {
        feature: _sample(bags, position, fullest[:EXAMPLES], rule)
        for position, (feature, rule) in enumerate(rules)
        if position < FEATURES_MAX
    }


def _sample(bags: Bags, feature: int, examples: list[int], rule: IdRule) -> list[list[int | str]]:
    """Returns a bag of ids for each of ``examples``. String ids come from the id rule, because
    goldens have only their hashes."""
    if rule.id_type == "string":
        return [list(rule.examples)] * len(examples)
    ends = bags.lengths.reshape(-1).cumsum().reshape(bags.lengths.shape)
    return [
        [
            one if abs(one) <= EXACT_MAX else str(one)
            for one in bags.ids[ends[feature, i] - bags.lengths[feature, i] : ends[feature, i]][
                :IDS_MAX
            ].tolist()
        ]
        for i in examples
    ]
