"""A request that a served model answers, made of its version's goldens: shown at the start, as a
command, and on the OpenAPI pages."""

from __future__ import annotations

import numpy as np

from embedserve_store import Bags, IdRule
from embedserve_store.format.manifest import Manifest

EXAMPLES = 2
IDS_MAX = 6
"""Of a bag."""
FEATURES_MAX = 32
"""Of a model that has more."""
EXACT_MAX = 2**53 - 1
"""Past it JavaScript, and so a page in a browser, has not every integer."""

Features = dict[str, list[list[int | str]]]


def example_features(manifest: Manifest, bags: Bags) -> Features:
    """Two of the golden examples ``bags``, those with ids for most features, shortened."""
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
    """A bag of ids for each of ``examples``. Goldens know strings by their hash only."""
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
