"""Tests of files of changed ids: the written ids are read back, and nothing else is accepted."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from embedserve_store import StoreError
from embedserve_store.format.changed_ids import (
    AS_PUBLISHED,
    REMOVED,
    ChangedIds,
    check_same_ids,
    decode_ids,
    encode_ids,
    no_ids,
    split_ids,
)
from embedserve_store.format.delta_manifest import DeltaFile, IdCounts
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec

USER = TableSpec("user", 10, 4, ("user", "friend"), "sum", "float32", ids=IdRule("map", entries=5))
ITEM = TableSpec("item", 9, 4, ("item",), "sum", "float32", ids=IdRule("map", entries=5))
TABLES = {"user": USER, "item": ITEM}
IDS = np.array([-(2**63), -5, 7, 2**63 - 1])
ROWS = np.array([9, REMOVED, 0, 3])
CHANGE = ChangedIds(USER, IDS, ROWS)


def encoded_ids(*changes: ChangedIds) -> tuple[DeltaFile, bytes]:
    return encode_ids(changes, "f")


def test_round_trip() -> None:
    file, data = encoded_ids(CHANGE, ChangedIds(ITEM, np.array([1]), np.array([REMOVED])))
    assert file.ids == {"user": IdCounts(3, 1), "item": IdCounts(0, 1)}
    assert not file.rows
    user, item = decode_ids(data, file, TABLES, "f")
    assert (user.table, user.ids.tolist(), user.rows.tolist()) == (
        USER,
        IDS.tolist(),
        ROWS.tolist(),
    )
    assert (item.ids.tolist(), item.rows.tolist()) == ([1], [REMOVED])


def test_many_ids_are_split_into_several_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedserve_store.format.changed_ids._FILE_IDS", 3)
    item = ChangedIds(ITEM, IDS, ROWS)
    parts = [*split_ids([CHANGE, no_ids(ITEM), item])]
    assert [[(one.table.name, len(one)) for one in part] for part in parts] == [
        [("user", 3)],
        [("user", 1), ("item", 2)],
        [("item", 2)],
    ]
    for table in (USER, ITEM):
        ids = [one.ids for part in parts for one in part if one.table is table]
        assert np.concatenate(ids).tolist() == IDS.tolist()


def with_changed_number(position: int, value: int) -> tuple[DeltaFile, bytes]:
    """Returns a whole file with one changed number. Positions count the ids, then id_rows, then
    removed."""
    file, data = encoded_ids(CHANGE)
    at = len(data) - 56 + 8 * position
    numbers = bytearray(data)
    numbers[at : at + 8] = int(value).to_bytes(8, "little", signed=True)
    changed = bytes(numbers)
    return replace(file, sha256=hashlib.sha256(changed).hexdigest()), changed


@pytest.mark.parametrize(
    ("position", "value", "error"),
    [
        (1, -(2**63), r"table 'user': ids\[1\] is -9223372036854775808 after -9223372036854775808"),
        (3, 10, r"table 'user': id_rows\[0\] is 10, the table has 10 rows"),
        (4, -1, r"table 'user': id_rows\[1\] is -1, the table"),
        (6, 7, r"table 'user': id 7 has a row, and is removed"),
    ],
)
def test_invalid_numbers_are_rejected(position: int, value: int, error: str) -> None:
    file, data = with_changed_number(position, value)
    with pytest.raises(StoreError, match=f"^where: {error}"):
        decode_ids(data, file, TABLES, "where")


def test_file_that_differs_from_its_manifest_is_rejected() -> None:
    file, data = encoded_ids(CHANGE)
    with pytest.raises(StoreError, match="sha256"):
        decode_ids(data[:-1] + b"!", file, TABLES, "f")
    with pytest.raises(StoreError, match="bytes, the manifest has"):
        decode_ids(data[:-8], file, TABLES, "f")
    for counts in (IdCounts(4, 1), IdCounts(2**60, 1), IdCounts(3, 0)):
        with pytest.raises(StoreError, match="its tensors differ"):
            decode_ids(data, replace(file, ids={"user": counts}), TABLES, "f")


def test_later_changes_override_earlier_changes() -> None:
    later = ChangedIds(USER, np.array([-5, 1, 7]), np.array([4, 5, REMOVED]))
    both = CHANGE.then(later)
    assert dict(zip(both.ids.tolist(), both.rows.tolist(), strict=True)) == {
        -(2**63): 9,
        -5: 4,
        1: 5,
        7: REMOVED,
        2**63 - 1: 3,
    }
    queried_ids = np.array([7, 8, -5])
    assert both.rows_of(queried_ids, np.array([1, 2, 3])).tolist() == [REMOVED, 2, 4]
    assert no_ids(USER).rows_of(queried_ids, AS_PUBLISHED).tolist() == [AS_PUBLISHED] * 3


def test_tables_that_share_a_feature_must_have_the_same_changes() -> None:
    shares = replace(ITEM, feature_names=("friend",))
    base = Manifest("m", 1, (USER, shares), is_weighted=False)
    same = ChangedIds(shares, IDS, ROWS)
    check_same_ids({"user": CHANGE, "item": same}, base, "delta 4")
    for other in (replace(same, rows=ROWS + (ROWS == 0)), no_ids(shares)):
        with pytest.raises(StoreError, match=r"^delta 4: tables 'user' and 'item' share features"):
            check_same_ids({"user": CHANGE, "item": other}, base, "delta 4")
