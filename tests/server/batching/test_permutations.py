"""Tests of permutations: bags and ids move as in straightforward loops."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from embedserve.batching.permutations import bags_to_ids, feature_major_order, request_major_order


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    features=st.integers(1, 4),
)
def test_feature_major_order_equals_a_simple_loop(sizes: list[int], features: int) -> None:
    bags, start = [], 0
    for size in sizes:
        bags.append(np.arange(start, start + features * size).reshape(features, size))
        start += features * size
    expected = np.concatenate(bags, axis=1).reshape(-1)
    assert feature_major_order(np.array(sizes), features).tolist() == expected.tolist()


@given(data=st.data())
def test_bags_to_ids_moves_whole_bags(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    order = data.draw(st.permutations(range(len(lengths))))
    bags = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    expected = np.concatenate([bags[i] for i in order])
    positions = bags_to_ids(np.array(lengths, np.int32), np.array(order))
    assert positions.tolist() == expected.tolist()


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    features=st.integers(1, 4),
)
def test_request_major_order_inverts_feature_major_order(sizes: list[int], features: int) -> None:
    there = feature_major_order(np.array(sizes), features)
    back = request_major_order(np.array(sizes), features)
    assert there[back].tolist() == list(range(features * sum(sizes)))
