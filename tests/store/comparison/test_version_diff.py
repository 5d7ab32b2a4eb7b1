"""Tests of the comparison of two versions: tables that are added, removed, changed or grown."""

from __future__ import annotations

import pytest
import torch
from store.comparison.rows import BASE, Publish, only, rows_of, with_rows
from torchrec import PoolingType

from embedserve_store.comparison import row_diff
from embedserve_store.comparison.row_diff import RowDiff
from embedserve_store.comparison.version_diff import compare
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.table_spec import DTYPES


def test_the_same_model_again_differs_in_nothing(published: Publish) -> None:
    found = compare(published({"t": BASE}), published({"t": BASE}))
    assert not found.is_changed
    assert rows_of(found) == RowDiff(rows=40)


def test_tables_of_one_checksum_are_not_read(
    published: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = published({"t": BASE}), published({"t": BASE})
    monkeypatch.setattr(row_diff.RowComparison, "add", None)
    calls: list[tuple[str, int, int, int]] = []
    compare(a, b, lambda *call: calls.append(call))
    assert calls == [("t", 40, 40, b.manifest.nbytes)]


def test_tables_added_and_removed(published: Publish) -> None:
    found = compare(published({"t": BASE, "old": BASE}), published({"t": BASE, "new": BASE}))
    assert [table.name for table in found.added] == ["new"]
    assert [table.name for table in found.removed] == ["old"]
    assert [table.after.name for table in found.tables] == ["t"]
    assert found.layout == ("key 'old' is gone", "key 'new' is new")
    assert found.is_changed


def test_another_dtype_is_compared_by_value(published: Publish) -> None:
    halves = BASE.half().float()
    found = compare(published({"t": halves}), published({"t": halves}, dtype="float16"))
    assert only(found).changes == ("dtype float32 to float16",)
    assert rows_of(found) == RowDiff(rows=40)
    found = compare(published({"t": BASE}), published({"t": BASE}, dtype="int8"))
    assert 30 <= rows_of(found).rows_changed <= 40
    assert 0 < rows_of(found).relative_l2_max < 0.05


def test_of_a_grown_table_the_common_rows_are_compared(published: Publish) -> None:
    grown = torch.cat((with_rows({1: 1.0}), torch.ones(5, 8)))
    a, b = published({"t": BASE}), published({"t": grown})
    for found, change in ((compare(a, b), "rows 40 to 45"), (compare(b, a), "rows 45 to 40")):
        assert only(found).changes == (change,)
        assert (rows_of(found).rows, rows_of(found).rows_changed) == (40, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_fills_rows_up_is_no_part_of_them(published: Publish, dtype: str) -> None:
    before, after = BASE[:, :7], with_rows({3: 1.0})[:, :7]
    found = compare(published({"t": before}, dtype=dtype), published({"t": after}, dtype=dtype))
    assert only(found).changes == ()
    assert (rows_of(found).rows_changed, rows_of(found).row_max) == (1, 3)
    floats, half = published({"t": before.half().float()}), {"dtype": "float16"}
    assert rows_of(compare(floats, published({"t": before}, **half))) == RowDiff(rows=40)


def test_tables_of_other_dims_have_no_rows_in_common(published: Publish) -> None:
    found = compare(published({"t": BASE}), published({"t": torch.ones(40, 4)}))
    assert only(found).rows is None
    assert found.layout == ("key 't': dim 8 to 4",)
    assert found.is_changed


def test_pooling_features_ids_and_weights_are_changes(published: Publish) -> None:
    found = compare(
        published({"t": BASE}),
        published(
            {"t": BASE},
            pooling=PoolingType.MEAN,
            features={"t": ["t", "u"]},
            ids={"t": IdRule("modulo", modulus=30, offset=2)},
            is_weighted=True,
        ),
    )
    assert only(found).changes == ()
    assert rows_of(found).rows_changed == 0
    assert found.layout == (
        "key 'u' is new",
        "key 't': pooling sum to mean",
        "feature 't': ids rows unknown error to modulo modulus 30 offset 2",
        "takes weights now",
    )


def test_another_vocabulary_is_a_change_even_of_the_same_length(published: Publish) -> None:
    first = published({"t": BASE}, vocabularies={"t": list(range(40))})
    second = published({"t": BASE}, vocabularies={"t": list(range(1, 41))})
    assert not compare(first, first).is_changed
    assert only(compare(first, second)).changes == (
        "a vocabulary of 40 ids to another of 40: a row may stand for another id",
    )


def test_a_plan_that_differs_is_one_line(published: Publish) -> None:
    tables = {"a": BASE, "b": BASE}
    one = published(tables, world_size=2)
    two = published(tables, sharding={"a": "row_wise", "b": "table_wise"}, world_size=4)
    assert compare(one, one).plan == ""
    line = compare(one, two).plan
    assert line.startswith("2 to 4 ranks; a table_wise to row_wise")
    assert "\n" not in line
