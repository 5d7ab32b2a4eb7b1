"""Tests of the vocabularies of a line: the row that each new id gets, compared with a dict."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedserve_store import InvalidModelError
from embedserve_store.deltas.vocabularies import LineVocabularies, RequestedIds
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
) -> LineVocabularies:
    tables = tables or (TABLE,)
    base = Manifest("m", 1, tables, is_weighted=False)
    return LineVocabularies(base, {table.name: id_map() for table in tables}, changed or {})


def new_ids(*ids: int) -> RequestedIds:
    return RequestedIds(new={"t": array(ids)})


def removed_ids(*ids: int) -> RequestedIds:
    return RequestedIds(removed={"t": array(ids)})


def assigned_ids(entries: Mapping[int, int]) -> RequestedIds:
    return RequestedIds(assigned={"t": (array([*entries]), array([*entries.values()]))})


def apply_changes(vocabulary: LineVocabularies, *requests: RequestedIds) -> dict[int, int]:
    """Applies the changes for ``requests``; returns the changes of table t."""
    changes = vocabulary.find_changes(requests, {})
    vocabulary.advance(changes)
    change = changes.get("t", ChangedIds(TABLE, array([]), array([])))
    return dict(zip(change.ids.tolist(), change.rows.tolist(), strict=True))


def test_new_ids_get_free_rows() -> None:
    vocabulary = vocabularies()
    assert apply_changes(vocabulary, new_ids(7, 5)) == {5: 0, 7: 2}
    assert vocabulary.rows_of("t", array([5, 7, 100, 9])).tolist() == [0, 2, 1, -1]
    assert apply_changes(vocabulary, new_ids(9), new_ids(8)) == {8: 4, 9: 5}
    with pytest.raises(
        InvalidModelError, match=r"table 't': 2 new ids, but only 0 rows without an id: remove ids"
    ):
        vocabulary.find_changes([new_ids(1, 2)], {})


def test_rows_of_removed_ids_are_reused_last_and_only_if_free() -> None:
    vocabulary = vocabularies()
    assert apply_changes(vocabulary, new_ids(1)) == {1: 0}
    assert apply_changes(vocabulary, removed_ids(100, 200)) == {100: REMOVED, 200: REMOVED}
    assert apply_changes(vocabulary, new_ids(2, 3, 4)) == {2: 2, 3: 4, 4: 5}
    assert apply_changes(vocabulary, new_ids(5)) == {5: 1}  # row 3 still has id 300
    in_one_delta = apply_changes(vocabulary, removed_ids(300), new_ids(6))
    assert in_one_delta == {300: REMOVED, 6: 3}


def test_default_row_of_unknown_ids_is_never_assigned() -> None:
    rule = replace(RULE, unknown="row", default_row=0)
    assert apply_changes(vocabularies(replace(TABLE, ids=rule)), new_ids(1)) == {1: 2}


def test_training_may_choose_the_rows_of_ids() -> None:
    vocabulary = vocabularies()
    assert apply_changes(vocabulary, assigned_ids({100: 1, 200: 5, 7: 0}), removed_ids(300)) == {
        200: 5,
        7: 0,
        300: REMOVED,
    }
    assert apply_changes(vocabulary, new_ids(1, 2, 3)) == {1: 2, 2: 3, 3: 4}


def test_earlier_changes_of_a_continued_line_are_respected() -> None:
    before = ChangedIds(TABLE, array([5, 100, 200]), array([0, REMOVED, 2]))
    vocabulary = vocabularies(changed={"t": before})
    assert vocabulary.rows_of("t", array([5, 100, 200, 300])).tolist() == [0, -1, 2, 3]
    assert apply_changes(vocabulary, new_ids(1, 2, 3)) == {1: 1, 2: 4, 3: 5}


def test_tables_that_share_a_feature_get_the_same_changes() -> None:
    other = replace(TABLE, name="u", num_embeddings=5, feature_names=("f", "g"))
    vocabulary = vocabularies(TABLE, other)
    requests = RequestedIds(new={"u": array([1])}, removed={"t": array([100])})
    changes = vocabulary.find_changes([requests, new_ids(1)], {})
    assert [(c.table, c.ids.tolist(), c.rows.tolist()) for c in changes.values()] == [
        (TABLE, [1, 100], [0, REMOVED]),
        (other, [1, 100], [0, REMOVED]),
    ]
    with pytest.raises(InvalidModelError, match="id 7 has row 5, the table has 5 rows"):
        vocabulary.find_changes([assigned_ids({7: 5})], {})


@pytest.mark.parametrize(
    ("requests", "error"),
    [
        ([removed_ids(7)], "id 7 is removed, but is not in the vocabulary"),
        ([removed_ids(100), removed_ids(100)], "id 100 is given twice"),
        ([assigned_ids({7: 0}), removed_ids(100), assigned_ids({7: 0})], "id 7 is given twice"),
        ([assigned_ids({100: 0}), removed_ids(100)], "id 100 is given twice"),
        ([assigned_ids({7: 6})], "id 7 has row 6, the table has 6 rows"),
        ([assigned_ids({7: -1})], "id 7 has row -1, the table has 6 rows"),
    ],
)
def test_invalid_id_changes_are_rejected_without_effect(
    requests: list[RequestedIds], error: str
) -> None:
    vocabulary = vocabularies()
    with pytest.raises(InvalidModelError, match=f"^table 't': {error}"):
        vocabulary.find_changes(requests, {})
    assert apply_changes(vocabulary, new_ids(7)) == {7: 0}


def test_requested_changes_override_reapplied_changes() -> None:
    reapplied = {"t": ChangedIds(TABLE, array([1, 2, 100, 200]), array([4, 5, REMOVED, 0]))}
    vocabulary = vocabularies()
    changes = vocabulary.find_changes([assigned_ids({1: 2}), removed_ids(200)], reapplied)["t"]
    assert dict(zip(changes.ids.tolist(), changes.rows.tolist(), strict=True)) == {
        1: 2,
        2: 5,
        100: REMOVED,
        200: REMOVED,
    }


def test_reapplied_id_keeps_its_earlier_row() -> None:
    """The id also keeps that row if its rows are now pushed by ids, and it may be removed before
    its first delta."""
    reapplied = {"t": ChangedIds(TABLE, array([1, 2]), array([4, 5]))}
    changes = vocabularies().find_changes([new_ids(1, 7), removed_ids(2)], reapplied)["t"]
    assert dict(zip(changes.ids.tolist(), changes.rows.tolist(), strict=True)) == {1: 4, 7: 0}


@given(data=st.data())
def test_no_new_id_shares_a_row_with_another_id(data: st.DataObject) -> None:
    vocabulary, state = vocabularies(), dict(PUBLISHED)
    for _ in range(6):
        removed_now = data.draw(st.lists(st.sampled_from([*state]), unique=True)) if state else []
        ids = data.draw(st.lists(st.integers(0, 9), unique=True))
        fresh = [one_id for one_id in ids if one_id not in state]
        rest = {i: row for i, row in state.items() if i not in removed_now}
        requests = [new_ids(*fresh), removed_ids(*removed_now)]
        if len(fresh) > 6 - len({*rest.values()}):
            with pytest.raises(InvalidModelError, match="rows without an id"):
                vocabulary.find_changes(requests, {})
            continue
        made = apply_changes(vocabulary, *requests)
        rows = [made[i] for i in fresh]
        assert len({*rows}) == len(rows)
        assert not {*rows} & {*rest.values()}
        state = rest | {i: made[i] for i in fresh}
        assert vocabulary.rows_of("t", array([*state])).tolist() == [*state.values()]
