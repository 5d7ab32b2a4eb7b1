"""Tests of the goldens' sample of bags: it has every edge case, and is the same each time."""

import numpy as np

from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.goldens.sampled_bags import EXAMPLES, sample_bags
from embedserve_store.ids.id_map import IdMap

TABLES = (
    TableSpec("a", 1000, 8, ("x", "y"), "sum", "float32"),
    TableSpec("b", 1, 4, ("z",), "mean", "float32"),
    TableSpec("c", 50, 4, ("y",), "sum", "float32"),
)
PLAIN = Manifest("m", 1, TABLES, is_weighted=False)
WEIGHTED = Manifest("m", 1, TABLES, is_weighted=True)


def test_sampled_bags_include_first_and_last_rows_and_none_beyond() -> None:
    bags = sample_bags(PLAIN, {})
    assert bags.lengths.shape == (3, EXAMPLES)
    assert bags.lengths.min() == 0
    assert bags.lengths.max() <= 8
    assert (bags.lengths[:, 1] == 0).all()
    by_feature = np.split(bags.ids, np.cumsum(bags.lengths.sum(axis=1))[:-1])
    for ids, rows in zip(by_feature, (1000, 50, 1), strict=True):
        assert ids[:2].tolist() == [0, rows - 1]
        assert ids.max() < rows


def test_feature_with_an_empty_id_map_has_no_ids() -> None:
    none = np.zeros(0, np.int64)
    bags = sample_bags(PLAIN, {"b": IdMap.build(none, none, "b")})
    assert bags.lengths.any(axis=1).tolist() == [True, True, False]
    assert len(bags.ids) == bags.lengths.sum()


def test_sampled_bags_are_deterministic() -> None:
    first, second = sample_bags(WEIGHTED, {}), sample_bags(WEIGHTED, {})
    np.testing.assert_array_equal(first.ids, second.ids)
    np.testing.assert_array_equal(first.lengths, second.lengths)
    np.testing.assert_array_equal(first.weights, second.weights)
