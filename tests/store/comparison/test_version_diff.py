"""Tests of the comparison of two versions: tables that are added, removed, changed or grown."""

import pytest
import torch
from store.comparison.rows import BASE, Publish, row_diff_of, single_table, with_rows

from embedserve_store.comparison import row_diff
from embedserve_store.comparison.row_diff import RowDiff
from embedserve_store.comparison.version_diff import compare
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.table_spec import DTYPES


def test_identical_models_have_no_differences(publish_tables: Publish) -> None:
    found = compare(publish_tables({"t": BASE}), publish_tables({"t": BASE}))
    assert not found.is_changed
    assert row_diff_of(found) == RowDiff(rows=40)


def test_tables_with_equal_checksums_are_not_read(
    publish_tables: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = publish_tables({"t": BASE}), publish_tables({"t": BASE})
    monkeypatch.setattr(row_diff.RowComparison, "add", None)
    calls: list[tuple[str, int, int, int]] = []
    compare(a, b, lambda *call: calls.append(call))
    assert calls == [("t", 40, 40, b.manifest.nbytes)]


def test_added_and_removed_tables_are_reported(publish_tables: Publish) -> None:
    found = compare(
        publish_tables({"t": BASE, "old": BASE}), publish_tables({"t": BASE, "new": BASE})
    )
    assert [table.name for table in found.added] == ["new"]
    assert [table.name for table in found.removed] == ["old"]
    assert [table.after.name for table in found.tables] == ["t"]
    assert found.layout == ("key 'old' is gone", "key 'new' is new")
    assert found.is_changed


def test_tables_of_different_dtypes_are_compared_by_value(publish_tables: Publish) -> None:
    halves = BASE.half().float()
    found = compare(publish_tables({"t": halves}), publish_tables({"t": halves}, dtype="float16"))
    assert single_table(found).changes == ("dtype float32 to float16",)
    assert row_diff_of(found) == RowDiff(rows=40)
    found = compare(publish_tables({"t": BASE}), publish_tables({"t": BASE}, dtype="int8"))
    assert 30 <= row_diff_of(found).rows_changed <= 40
    assert 0 < row_diff_of(found).relative_l2_max < 0.05


def test_only_common_rows_of_a_grown_table_are_compared(publish_tables: Publish) -> None:
    grown = torch.cat((with_rows({1: 1.0}), torch.ones(5, 8)))
    a, b = publish_tables({"t": BASE}), publish_tables({"t": grown})
    for found, change in ((compare(a, b), "rows 40 to 45"), (compare(b, a), "rows 45 to 40")):
        assert single_table(found).changes == (change,)
        assert (row_diff_of(found).rows, row_diff_of(found).rows_changed) == (40, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_of_rows_is_not_compared(publish_tables: Publish, dtype: str) -> None:
    before, after = BASE[:, :7], with_rows({3: 1.0})[:, :7]
    found = compare(
        publish_tables({"t": before}, dtype=dtype), publish_tables({"t": after}, dtype=dtype)
    )
    assert single_table(found).changes == ()
    assert (row_diff_of(found).rows_changed, row_diff_of(found).row_max) == (1, 3)
    floats, half = publish_tables({"t": before.half().float()}), {"dtype": "float16"}
    assert row_diff_of(compare(floats, publish_tables({"t": before}, **half))) == RowDiff(rows=40)


def test_tables_of_different_dims_are_not_compared_by_row(publish_tables: Publish) -> None:
    found = compare(publish_tables({"t": BASE}), publish_tables({"t": torch.ones(40, 4)}))
    assert single_table(found).rows is None
    assert found.layout == ("key 't': dim 8 to 4",)
    assert found.is_changed


def test_changed_pooling_features_ids_and_weights_are_reported(publish_tables: Publish) -> None:
    found = compare(
        publish_tables({"t": BASE}),
        publish_tables(
            {"t": BASE},
            pooling="mean",
            features=("t", "u"),
            ids={"t": IdRule("modulo", modulus=30, offset=2)},
            is_weighted=True,
        ),
    )
    assert single_table(found).changes == ()
    assert row_diff_of(found).rows_changed == 0
    assert found.layout == (
        "key 'u' is new",
        "key 't': pooling sum to mean",
        "feature 't': ids rows unknown error to modulo modulus 30 offset 2",
        "takes weights now",
    )


def test_changed_vocabulary_of_the_same_length_is_reported(publish_tables: Publish) -> None:
    first = publish_tables({"t": BASE}, vocabularies={"t": list(range(40))})
    second = publish_tables({"t": BASE}, vocabularies={"t": list(range(1, 41))})
    assert not compare(first, first).is_changed
    assert single_table(compare(first, second)).changes == (
        "a vocabulary of 40 ids to another of 40: a row may stand for another id",
    )


def test_plan_difference_is_described_in_one_line(publish_tables: Publish) -> None:
    tables = {"a": BASE, "b": BASE}
    one = publish_tables(tables, world_size=2)
    two = publish_tables(tables, sharding={"a": "row_wise", "b": "table_wise"}, world_size=4)
    assert compare(one, one).plan == ""
    line = compare(one, two).plan
    assert line.startswith("2 to 4 ranks; a table_wise to row_wise")
    assert "\n" not in line


def test_difference_of_parts_is_described(publish_tables: Publish) -> None:
    tables, shared = {"a": BASE, "b": BASE[:20]}, {"sharding": "row_wise"}
    one, two, three = (publish_tables(tables, hosts=hosts, **shared) for hosts in (1, 2, 4))
    moved = publish_tables(tables, hosts=2, sharding={"a": "row_wise", "b": "table_wise"})
    assert compare(one, two).plan == "no to 2 parts"
    assert compare(two, three).plan == "2 to 4 parts"
    assert compare(three, three).plan == ""
    assert compare(two, moved).plan.startswith("other rows on the parts; ")
    assert compare(one, two).is_changed
