"""Tests of the index of ids, against a dict: every int64 and every pattern of ids."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedserve_store.errors import InvalidModelError
from embedserve_store.ids.id_index import (
    WINDOW,
    IdIndex,
    bucket_count,
    build_index,
    find_duplicate,
    mixed,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
ROW = st.integers(0, 2**32 - 1)
EDGES = [0, -1, 1, -(2**63), 2**63 - 1, 2**32, 2**32 - 1]


def index_of(entries: dict[int, int]) -> IdIndex:
    ids = np.array(list(entries), np.int64)
    return build_index(ids, np.array(list(entries.values()), np.int64), "table 't'")


def look_up(index: IdIndex, ids: list[int], entries: int) -> list[int]:
    rows = index.rows_of(np.array(ids, np.int64), 0, bucket_count(entries), 0)
    return [int(row) for row in rows]


@settings(max_examples=150)
@given(
    st.dictionaries(st.sampled_from(EDGES) | st.integers(-20, 20) | INT64, ROW, max_size=60),
    st.lists(INT64 | st.sampled_from(EDGES), max_size=20),
)
def test_index_lookups_equal_dict_lookups(entries: dict[int, int], others: list[int]) -> None:
    requested = [*entries, *others, *EDGES]
    answers = look_up(index_of(entries), requested, len(entries))
    assert answers == [entries.get(one, -1) for one in requested]


@pytest.mark.parametrize(
    "ids",
    [
        np.arange(100_000),
        -np.arange(100_000),
        np.arange(100_000) << 40,
        np.arange(100_000) * 2**47 - 2**62,
        np.arange(100_000) * 10**9 + 7,
        np.arange(100_000) * -6554388222349169827,  # steps that a multiplication alone would undo
        np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 100_000),
    ],
)
def test_no_pattern_of_ids_fills_a_bucket(ids: np.ndarray) -> None:
    index = build_index(ids, np.arange(len(ids)), "t")
    sizes = np.diff(index.starts.astype(np.int64))
    assert sizes.sum() == len(ids)
    # Buckets hold 8/7 ids on average. A random function fills one with 14 or more once in 10**11.
    assert sizes.max() < 14
    assert 1.0 < sizes.var() < 1.3
    rows = index.rows_of(ids, 0, bucket_count(len(ids)), 0)
    np.testing.assert_array_equal(rows, np.arange(len(ids)))
    unknown = index.rows_of(ids ^ (1 << 62), 0, bucket_count(len(ids)), 0)
    assert (unknown[~np.isin(ids ^ (1 << 62), ids)] == -1).all()


def test_all_ids_of_one_overfull_bucket_are_found() -> None:
    # Takes the numbers below 3,000,000 that share a bucket in an index of a few dozen ids. A lookup
    # in that bucket takes many rounds.
    numbers = np.arange(3_000_000)
    in_first = numbers[mixed(numbers) >> np.uint64(64 - 16) == 0]
    assert len(in_first) > 5 * WINDOW
    index = build_index(in_first, np.arange(len(in_first)), "t")
    assert index.starts[1] == len(in_first)
    rows = index.rows_of(in_first, 0, bucket_count(len(in_first)), 0)
    np.testing.assert_array_equal(rows, np.arange(len(in_first)))
    assert look_up(index, [-5, 3_000_000], len(in_first)) == [-1, -1]


@settings(max_examples=50)
@given(
    st.lists(st.dictionaries(st.integers(-5, 30), ROW, max_size=20), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 30)), max_size=50),
)
def test_tables_in_a_joined_index_are_isolated(
    tables: list[dict[int, int]], requested: list[tuple[int, int]]
) -> None:
    indexes = [index_of(entries) for entries in tables]
    joined = IdIndex(
        starts=np.concatenate([index.starts for index in indexes]),
        ids=np.concatenate([index.ids for index in indexes]),
        rows=np.concatenate([index.rows for index in indexes]),
    )
    first_bucket = np.cumsum([0] + [index.starts.size for index in indexes])
    first_slot = np.cumsum([0] + [index.ids.size for index in indexes])
    which = np.array([table % len(tables) for table, _ in requested], np.int64)
    buckets = np.array([bucket_count(len(entries)) for entries in tables], np.uint64)
    rows = joined.rows_of(
        np.array([one for _, one in requested], np.int64),
        first_bucket[which],
        buckets[which],
        first_slot[which],
    )
    expected = [tables[table % len(tables)].get(one, -1) for table, one in requested]
    assert rows.tolist() == expected


def test_index_bytes_do_not_depend_on_entry_order() -> None:
    random = np.random.default_rng(0)
    ids, rows = np.arange(1000) * 977, random.integers(0, 100, 1000)
    first = build_index(ids, rows, "t")
    order = random.permutation(1000)
    second = build_index(ids[order], rows[order], "t")
    for part in ("starts", "ids", "rows"):
        assert getattr(first, part).tobytes() == getattr(second, part).tobytes()


def test_index_takes_at_most_16_bytes_per_entry_and_build_peak_32() -> None:
    count = 200_000
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, count)
    rows = np.arange(count)
    peaks = []
    # The smallest of three peaks: other work, such as imports of the first call, adds to some.
    for _ in range(3):
        tracemalloc.start()
        try:
            index = build_index(ids, rows, "t")
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert min(peaks) <= 32 * count + 10_000
    assert index.starts.nbytes + index.ids.nbytes + index.rows.nbytes <= 16 * count


@pytest.mark.parametrize("row", [-1, 2**32])
def test_rows_outside_uint32_are_rejected(row: int) -> None:
    with pytest.raises(InvalidModelError, match="t: maps of ids hold rows from 0 to 4294967295"):
        build_index(np.array([3, 4]), np.array([0, row]), "t")


@settings(max_examples=50)
@given(st.lists(INT64 | st.integers(-5, 5), max_size=20))
def test_find_duplicate_returns_positions_of_equal_ids(values: list[int]) -> None:
    found = find_duplicate(np.array(values, np.int64))
    assert (found is None) == (len(set(values)) == len(values))
    if found:
        first, second = found
        assert first < second
        assert values[first] == values[second]
