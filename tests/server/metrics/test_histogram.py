"""Tests of histograms: bounds of buckets, and observations between scrapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedserve.metrics.histogram import PENDING_MAX, Histogram


def test_value_equal_to_a_bound_is_counted_in_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    histogram.observe_many([0.5, 1.0, 1.5, 2.0, 4.0, 4.1])
    buckets, total = histogram.samples()
    assert buckets == [("1.0", 2), ("2.0", 4), ("4.0", 5), ("+Inf", 6)]
    assert total == pytest.approx(13.1)


@given(values=st.lists(st.floats(0, 10), max_size=40), cut=st.integers(0, 40))
def test_buckets_count_all_values_up_to_their_bounds(values: list[float], cut: int) -> None:
    bounds = (0.1, 1.0, 5.0)
    histogram = Histogram(bounds)
    histogram.observe_many(values[:cut])
    histogram.samples()  # a scrape in between changes nothing
    for single in values[cut:]:
        histogram.observe(single)
    counts = [count for _, count in histogram.samples()[0]]
    assert counts == [sum(v <= bound for v in values) for bound in (*bounds, float("inf"))]


def test_observations_beyond_the_pending_limit_are_not_lost() -> None:
    histogram = Histogram((1.0,))
    for _ in range(2 * PENDING_MAX + 3):
        histogram.observe(0.5)
    assert histogram.samples() == (
        [("1.0", 2 * PENDING_MAX + 3), ("+Inf", 2 * PENDING_MAX + 3)],
        0.5 * (2 * PENDING_MAX + 3),
    )
