"""Tests of cells with a key: zeroed for another key, and summed over the workers with the same
key."""

import pytest

from embedserve.metrics.shared_counters import (
    KeyedCounters,
    KeyedTable,
    SharedCounters,
    WorkerCounters,
    key_of,
    single_worker_counters,
)


def keyed_of_workers(count: int, cells: int) -> list[KeyedCounters]:
    slots = SharedCounters(count, 1 + cells)
    return [WorkerCounters(slots, worker).allocate_keyed() for worker in range(count)]


def tables_of_workers(count: int, entries: int) -> list[KeyedTable]:
    slots = SharedCounters(count, 2 * entries)
    return [KeyedTable(WorkerCounters(slots, worker), entries, 1) for worker in range(count)]


def claim(table: KeyedTable, name: str, kept: tuple[str, ...] | None = None) -> int | None:
    i = table.find(name, None if kept is None else table.gone({*map(key_of, kept)}))
    if i is not None:
        table.entries[i].claim(key_of(name))
        table.entries[i].allocate(1).own[0] += 1
    return i


def test_only_workers_with_the_same_key_are_summed() -> None:
    one, other = keyed_of_workers(2, 2)
    one.claim(7)
    cells = one.allocate(2)
    other.claim(8)
    cells.own[:] = 1
    other.allocate(2).own[:] = 10
    assert cells.total().tolist() == [1, 1]
    other.claim(7)
    assert cells.total().tolist() == [1, 1]
    other.allocate(2).own[:] = 5
    assert cells.total().tolist() == [6, 6]


def test_same_key_continues_and_new_key_starts_from_zero() -> None:
    (keyed,) = keyed_of_workers(1, 3)
    keyed.claim(7)
    first = keyed.allocate(1)
    first.own[0] = 4
    keyed.claim(7)
    again = keyed.allocate(1)
    first.own[0] += 1  # by the holder of the cells of the claim before
    assert again.total().tolist() == [4]
    keyed.claim(8)
    assert keyed.allocate(3).total().tolist() == [0, 0, 0]
    again.own[0] += 1  # by the holder of the previous key's cells
    assert keyed.key == 8
    keyed.claim(8)
    assert keyed.allocate(1).total().tolist() == [0]


def test_nested_cells_are_detached_with_the_outer_key() -> None:
    outer = single_worker_counters(4).allocate_keyed()
    outer.claim(1)
    inner = outer.allocate_keyed()
    inner.claim(5)
    cells = inner.allocate(2)
    outer.claim(2)
    fresh = outer.allocate(3)
    cells.own[:] = 9
    inner.claim(6)
    cells.own[:] = 9
    assert fresh.total().tolist() == [0, 0, 0]


def test_allocating_more_cells_than_the_key_has_is_rejected() -> None:
    (keyed,) = keyed_of_workers(1, 2)
    keyed.claim(1)
    with pytest.raises(ValueError, match="count is 3: the row has 2 more cells"):
        keyed.allocate(3)


def test_name_has_the_same_entry_in_all_workers() -> None:
    one, other = tables_of_workers(2, 3)
    assert [claim(one, name) for name in "ab"] == [0, 1]
    assert [claim(other, name) for name in "cba"] == [2, 1, 0]
    assert one.find("d") is None  # entry 2 is free in this worker alone
    other.keep("ab")
    assert claim(one, "d") == 2
    assert one.find("e") is None


def test_entry_of_a_removed_name_is_reused() -> None:
    one, other = tables_of_workers(2, 2)
    assert claim(other, "x") == 0
    assert [claim(one, name, ("a", "b")) for name in "ab"] == [1, 0]
    assert claim(one, "c", ("a", "b", "c")) is None
    assert claim(one, "c", ("b", "c")) == 1
    assert [entry.key for entry in one.entries] == [key_of("b"), key_of("c")]
