"""Two versions compared: tables come, go, change and grow; rows move, also from and to zero."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

from embedserve_store import row_diff
from embedserve_store.diff import TableDiff, VersionDiff, compare
from embedserve_store.ids.rules import IdRule
from embedserve_store.load import ModelStore, ModelVersion
from embedserve_store.publishing.publish import publish
from embedserve_store.row_diff import RowDiff

Publish = Callable[..., ModelVersion]
Tables = dict[str, torch.Tensor]

BASE = torch.linspace(-1, 1, 40 * 8).reshape(40, 8)


@pytest.fixture
def published(tmp_path: Path) -> Publish:
    """Publishes tables of the given rows as the next version of "m"."""

    def run(tables: Tables, **options: Any) -> ModelVersion:
        pooling = options.pop("pooling", PoolingType.SUM)
        is_weighted = options.pop("is_weighted", False)
        features = options.pop("features", {})
        ebc = EmbeddingBagCollection(
            is_weighted=is_weighted,
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=len(rows),
                    embedding_dim=rows.shape[1],
                    feature_names=features.get(name, [name]),
                    pooling=pooling,
                )
                for name, rows in tables.items()
            ],
        )
        with torch.no_grad():
            for name, rows in tables.items():
                ebc.embedding_bags[name].weight.copy_(rows)
        number = publish(ebc, tmp_path / "store", model="m", **options).version
        return ModelStore(tmp_path / "store").load("m", number)

    return run


def only(found: VersionDiff) -> TableDiff:
    (table,) = found.tables
    return table


def rows_of(found: VersionDiff) -> RowDiff:
    rows = only(found).rows
    assert rows is not None
    return rows


def with_rows(changed: dict[int, torch.Tensor | float]) -> torch.Tensor:
    """BASE with other rows in places."""
    rows = BASE.clone()
    for number, row in changed.items():
        rows[number] = row
    return rows


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
    assert found.changes == ("features added: new", "features removed: old")
    assert found.is_changed


def test_changed_rows_are_counted_and_their_drift_is_relative(published: Publish) -> None:
    after = with_rows({3: BASE[3] * 1.5, 7: BASE[7] * -1, 39: BASE[39] * 2})
    rows = rows_of(compare(published({"t": BASE}), published({"t": after})))
    assert (rows.rows, rows.rows_changed, rows.rows_from_zero) == (40, 3, 0)
    assert rows.share_changed == 3 / 40
    assert rows.relative_l2_mean == pytest.approx((0.5 + 2 + 1) / 3)
    assert (rows.relative_l2_max, rows.row_max) == (pytest.approx(2), 7)
    assert rows.cosine_mean == pytest.approx((1 - 1 + 1) / 3)


def test_a_row_that_was_zero_counts_apart_and_one_that_became_zero_moved_by_all(
    published: Publish,
) -> None:
    before, after = with_rows({5: 0.0}), with_rows({5: 1.0, 6: 0.0})
    rows = rows_of(compare(published({"t": before}), published({"t": after})))
    assert (rows.rows_changed, rows.rows_from_zero) == (2, 1)
    assert (rows.relative_l2_mean, rows.relative_l2_max, rows.row_max) == (1, 1, 6)
    assert rows.cosine_mean == 0


def test_zeros_of_another_sign_are_changed_bytes_that_did_not_move(published: Publish) -> None:
    before, after = with_rows({5: 0.0}), with_rows({5: -0.0})
    rows = rows_of(compare(published({"t": before}), published({"t": after})))
    assert (rows.rows_changed, rows.rows_from_zero) == (1, 0)
    assert (rows.relative_l2_max, rows.row_max, rows.cosine_mean) == (0, 5, 1)


def test_rows_whose_squares_float32_cannot_hold_have_drift(published: Publish) -> None:
    before, after = with_rows({0: 1e30}), with_rows({0: -1e30})
    rows = rows_of(compare(published({"t": before}), published({"t": after})))
    assert (rows.relative_l2_max, rows.cosine_mean) == (pytest.approx(2), pytest.approx(-1))


def test_another_dtype_is_compared_by_value(published: Publish) -> None:
    halves = BASE.half().float()
    found = compare(published({"t": halves}), published({"t": halves}, dtype="float16"))
    assert only(found).changes == ("dtype float32 to float16",)
    assert rows_of(found) == RowDiff(rows=40)
    found = compare(published({"t": BASE}), published({"t": BASE}, dtype="int8"))
    assert 30 <= rows_of(found).rows_changed <= 40
    assert 0 < rows_of(found).relative_l2_max < 0.05


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
def test_small_dtypes_are_compared_by_bytes(published: Publish, dtype: str) -> None:
    after = with_rows({9: BASE[9] * 3})
    found = compare(published({"t": BASE}, dtype=dtype), published({"t": after}, dtype=dtype))
    rows = rows_of(found)
    assert (rows.rows_changed, rows.row_max) == (1, 9)
    assert rows.relative_l2_max == pytest.approx(2, rel=0.1)


def test_of_a_grown_table_the_common_rows_are_compared(published: Publish) -> None:
    grown = torch.cat((with_rows({1: 1.0}), torch.ones(5, 8)))
    a, b = published({"t": BASE}), published({"t": grown})
    for found, change in ((compare(a, b), "rows 40 to 45"), (compare(b, a), "rows 45 to 40")):
        assert only(found).changes == (change,)
        assert (rows_of(found).rows, rows_of(found).rows_changed) == (40, 1)


def test_tables_of_other_dims_have_no_rows_in_common(published: Publish) -> None:
    found = compare(published({"t": BASE}), published({"t": torch.ones(40, 4)}))
    assert only(found).rows is None
    assert only(found).changes == ("dim 8 to 4",)
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
    assert only(found).changes == (
        "pooling sum to mean",
        "features t to t, u",
        "ids rows unknown error to modulo modulus 30 offset 2",
    )
    assert rows_of(found).rows_changed == 0
    assert found.changes == ("features added: u", "takes weights now")


def test_another_vocabulary_is_a_change_even_of_the_same_length(published: Publish) -> None:
    first = published({"t": BASE}, vocabularies={"t": list(range(40))})
    second = published({"t": BASE}, vocabularies={"t": list(range(1, 41))})
    assert not compare(first, first).is_changed
    assert only(compare(first, second)).changes == (
        "ids of another vocabulary: a row may stand for another id",
    )


def test_a_plan_that_differs_is_one_line(published: Publish) -> None:
    tables = {"a": BASE, "b": BASE}
    one = published(tables, world_size=2)
    two = published(tables, sharding={"a": "row_wise", "b": "table_wise"}, world_size=4)
    assert compare(one, one).plan == ""
    line = compare(one, two).plan
    assert line.startswith("2 to 4 ranks; a table_wise to row_wise")
    assert "\n" not in line


def test_blocks_add_up_to_the_whole(published: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    before = torch.randn(1000, 8, generator=random)
    after = before + torch.randn(1000, 8, generator=random) * (torch.arange(1000) % 3 == 0)[:, None]
    a, b = published({"t": before}), published({"t": after})
    whole = rows_of(compare(a, b))
    monkeypatch.setattr(row_diff, "BLOCK_BYTES", 64 * 7)
    calls: list[tuple[str, int, int, int]] = []
    found = compare(a, b, lambda *call: calls.append(call))
    blocks = rows_of(found)
    assert len(calls) == -(-1000 // 7)
    assert calls[-1] == ("t", 1000, 1000, b.manifest.nbytes)
    assert (blocks.rows_changed, blocks.row_max) == (334, whole.row_max)
    distance = (after - before).norm(dim=1) / before.norm(dim=1)
    changed = torch.arange(1000) % 3 == 0
    expected = float(distance[changed].mean()), float(distance.max())
    for found_rows in (whole, blocks):
        measured = found_rows.relative_l2_mean, found_rows.relative_l2_max
        np.testing.assert_allclose(measured, expected, rtol=1e-5)
