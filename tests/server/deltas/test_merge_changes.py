"""Tests of merging the changes of several deltas: the last value of each row counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedserve.deltas.merge_changes import merged
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.table_spec import TableSpec

ROWS = {"a": 9, "b": 1000}
"""Rows of each table. Many rows change in one table and few in the other, which are merged in two
ways."""
TABLES = {name: TableSpec(name, ROWS[name], 4, (name,), "sum", "float32") for name in ROWS}
CHANGES = st.lists(st.tuples(st.sampled_from("ab"), st.sets(st.integers(0, 8))), max_size=6)


def changed(table: str, rows: set[int], value: int) -> ChangedRows:
    numbers = np.array(sorted(rows), np.int64)
    return ChangedRows(TABLES[table], numbers, np.full((len(rows), 16), value, np.uint8))


@pytest.mark.parametrize("table", TABLES)
def test_cost_of_merging_many_small_changes_is_linear(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers servers that are behind by thousands of small deltas."""
    searched, flatnonzero = [0], np.flatnonzero

    def counting_flatnonzero(array: np.ndarray) -> np.ndarray:
        searched[0] += array.size
        return flatnonzero(array)

    monkeypatch.setattr(np, "flatnonzero", counting_flatnonzero)
    changes = [changed(table, {number % 9}, number % 200) for number in range(2000)]
    (found,) = merged(changes)
    assert found.numbers.tolist() == [*range(9)]
    assert searched[0] <= ROWS[table] + len(changes)


@settings(max_examples=300)
@given(changes=CHANGES)
def test_last_value_of_each_row_wins(changes: list[tuple[str, set[int]]]) -> None:
    expected: dict[str, dict[int, int]] = {}
    for value, (table, rows) in enumerate(changes, 1):
        expected.setdefault(table, {}).update(dict.fromkeys(rows, value))
    found = merged([changed(t, rows, value) for value, (t, rows) in enumerate(changes, 1)])
    assert [one.table.name for one in found] == [*expected]
    for one in found:
        values = expected[one.table.name]
        assert one.numbers.tolist() == sorted(values)
        memory = np.zeros((20, 16), np.uint8)
        places = np.arange(len(values), dtype=np.uint32)[::-1] + 10  # anywhere, in any order
        one.write_to(memory, places)
        assert memory[places, 0].tolist() == [values[number] for number in one.numbers]
        assert (memory == memory[:, :1]).all()
        assert np.count_nonzero(memory[:, 0]) == len(values)
