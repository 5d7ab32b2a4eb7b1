"""Tests of the vocabularies of a line: the row that each new id gets, compared with a dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedserve_store import InvalidModelError
from embedserve_store.deltas.vocabularies import Vocabularies, WantedIds
from embedserve_store.format.changed_ids import REMOVED, ChangedIds
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.ids.id_map import IdMap

RULE = IdRule("map", entries=3)
TABLE = TableSpec("t", 6, 4, ("f",), "sum", "float32", ids=RULE)
PUBLISHED = {100: 1, 200: 3, 300: 3}


def array(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)


def id_map(entries: Mapping[int, int] = PUBLISHED) -> IdMap:
    return IdMap.build(array([*entries]), array([*entries.values()]), "t")


def vocabularies(
    *tables: TableSpec, changed: Mapping[str, ChangedIds] | None = None
) -> Vocabularies:
    tables = tables or (TABLE,)
    base = Manifest("m", 1, tables, is_weighted=False)
    return Vocabularies(base, {table.name: id_map() for table in tables}, changed or {})


def new(*ids: int) -> WantedIds:
    return WantedIds(new={"t": array(ids)})


def removed(*ids: int) -> WantedIds:
    return WantedIds(removed={"t": array(ids)})


def placed(entries: Mapping[int, int]) -> WantedIds:
    return WantedIds(placed={"t": (array([*entries]), array([*entries.values()]))})


def done(one: Vocabularies, *wanted: WantedIds) -> dict[int, int]:
    """Applies the changes for ``wanted``; returns the changes of table t."""
    changes = one.find_changes(wanted, {})
    one.advance(changes)
    change = changes.get("t", ChangedIds(TABLE, array([]), array([])))
    return dict(zip(change.ids.tolist(), change.rows.tolist(), strict=True))


def test_new_ids_get_rows_without_an_id() -> None:
    one = vocabularies()
    assert done(one, new(7, 5)) == {5: 0, 7: 2}
    assert one.rows_of("t", array([5, 7, 100, 9])).tolist() == [0, 2, 1, -1]
    assert done(one, new(9), new(8)) == {8: 4, 9: 5}
    with pytest.raises(
        InvalidModelError, match=r"table 't': 2 new ids, but only 0 rows without an id: remove ids"
    ):
        one.find_changes([new(1, 2)], {})


def test_rows_of_removed_ids_come_last_and_only_without_another_id() -> None:
    one = vocabularies()
    assert done(one, new(1)) == {1: 0}
    assert done(one, removed(100, 200)) == {100: REMOVED, 200: REMOVED}
    assert done(one, new(2, 3, 4)) == {2: 2, 3: 4, 4: 5}
    assert done(one, new(5)) == {5: 1}  # row 3 still has id 300
    assert done(one, removed(300), new(6)) == {300: REMOVED, 6: 3}  # in one delta


def test_the_row_of_unknown_ids_is_nobodys() -> None:
    rule = replace(RULE, unknown="row", default_row=0)
    assert done(vocabularies(replace(TABLE, ids=rule)), new(1)) == {1: 2}


def test_training_chooses_rows() -> None:
    one = vocabularies()
    assert done(one, placed({100: 1, 200: 5, 7: 0}), removed(300)) == {
        200: 5,
        7: 0,
        300: REMOVED,
    }
    assert done(one, new(1, 2, 3)) == {1: 2, 2: 3, 3: 4}


def test_a_line_that_goes_on_counts_earlier_changes() -> None:
    before = ChangedIds(TABLE, array([5, 100, 200]), array([0, REMOVED, 2]))
    one = vocabularies(changed={"t": before})
    assert one.rows_of("t", array([5, 100, 200, 300])).tolist() == [0, -1, 2, 3]
    assert done(one, new(1, 2, 3)) == {1: 1, 2: 4, 3: 5}


def test_tables_of_one_feature_get_the_same_changes() -> None:
    other = replace(TABLE, name="u", num_embeddings=5, feature_names=("f", "g"))
    one = vocabularies(TABLE, other)
    wanted = WantedIds(new={"u": array([1])}, removed={"t": array([100])})
    changes = one.find_changes([wanted, new(1)], {})
    assert [(c.table, c.ids.tolist(), c.rows.tolist()) for c in changes.values()] == [
        (TABLE, [1, 100], [0, REMOVED]),
        (other, [1, 100], [0, REMOVED]),
    ]
    with pytest.raises(InvalidModelError, match="id 7 has row 5, the table has 5 rows"):
        one.find_changes([placed({7: 5})], {})


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ([removed(7)], "id 7 is removed, but is not in the vocabulary"),
        ([removed(100), removed(100)], "id 100 is given twice"),
        ([placed({7: 0}), removed(100), placed({7: 0})], "id 7 is given twice"),
        ([placed({100: 0}), removed(100)], "id 100 is given twice"),
        ([placed({7: 6})], "id 7 has row 6, the table has 6 rows"),
        ([placed({7: -1})], "id 7 has row -1, the table has 6 rows"),
    ],
)
def test_wrong_ids_are_named_and_change_nothing(wanted: list[WantedIds], error: str) -> None:
    one = vocabularies()
    with pytest.raises(InvalidModelError, match=f"^table 't': {error}"):
        one.find_changes(wanted, {})
    assert done(one, new(7)) == {7: 0}


def test_changes_that_are_made_again_give_way_to_those_that_are_named() -> None:
    again = {"t": ChangedIds(TABLE, array([1, 2, 100, 200]), array([4, 5, REMOVED, 0]))}
    one = vocabularies()
    changes = one.find_changes([placed({1: 2}), removed(200)], again)["t"]
    assert dict(zip(changes.ids.tolist(), changes.rows.tolist(), strict=True)) == {
        1: 2,
        2: 5,
        100: REMOVED,
        200: REMOVED,
    }


def test_an_id_that_is_made_again_has_the_row_that_it_had_then() -> None:
    """The id also keeps that row if its rows are now pushed by ids, and it may be removed before
    its first delta."""
    again = {"t": ChangedIds(TABLE, array([1, 2]), array([4, 5]))}
    changes = vocabularies().find_changes([new(1, 7), removed(2)], again)["t"]
    assert dict(zip(changes.ids.tolist(), changes.rows.tolist(), strict=True)) == {1: 4, 7: 0}


@given(data=st.data())
def test_no_row_gets_a_second_id(data: st.DataObject) -> None:
    one, state = vocabularies(), dict(PUBLISHED)
    for _ in range(6):
        gone = data.draw(st.lists(st.sampled_from([*state]), unique=True)) if state else []
        ids = data.draw(st.lists(st.integers(0, 9), unique=True))
        fresh = [one_id for one_id in ids if one_id not in state]
        rest = {i: row for i, row in state.items() if i not in gone}
        wanted = [new(*fresh), removed(*gone)]
        if len(fresh) > 6 - len({*rest.values()}):
            with pytest.raises(InvalidModelError, match="rows without an id"):
                one.find_changes(wanted, {})
            continue
        made = done(one, *wanted)
        rows = [made[i] for i in fresh]
        assert len({*rows}) == len(rows)
        assert not {*rows} & {*rest.values()}
        state = rest | {i: made[i] for i in fresh}
        assert one.rows_of("t", array([*state])).tolist() == [*state.values()]
