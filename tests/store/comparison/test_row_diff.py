"""Tests of the difference of rows: how far each moves, also from and to zero, and sums over
blocks."""

import numpy as np
import pytest
import torch
from store.comparison.rows import BASE, Publish, row_diff_of, with_rows

from embedserve_store.comparison import row_diff
from embedserve_store.comparison.row_diff import cosines
from embedserve_store.comparison.version_diff import compare


def test_changed_rows_are_counted_and_their_drift_is_relative(publish_tables: Publish) -> None:
    after = with_rows({3: BASE[3] * 1.5, 7: BASE[7] * -1, 39: BASE[39] * 2})
    rows = row_diff_of(compare(publish_tables({"t": BASE}), publish_tables({"t": after})))
    assert (rows.rows, rows.rows_changed, rows.rows_from_zero) == (40, 3, 0)
    assert rows.share_changed == 3 / 40
    assert rows.relative_l2_mean == pytest.approx((0.5 + 2 + 1) / 3)
    assert rows.relative_l2_max == pytest.approx(2)
    assert rows.row_max == 7
    assert rows.cosine_mean == pytest.approx((1 - 1 + 1) / 3)


def test_rows_from_zero_are_counted_apart_and_rows_to_zero_drift_by_one(
    publish_tables: Publish,
) -> None:
    before, after = with_rows({5: 0.0}), with_rows({5: 1.0, 6: 0.0})
    rows = row_diff_of(compare(publish_tables({"t": before}), publish_tables({"t": after})))
    assert (rows.rows_changed, rows.rows_from_zero) == (2, 1)
    assert (rows.relative_l2_mean, rows.relative_l2_max, rows.row_max) == (1, 1, 6)
    assert rows.cosine_mean == 0


def test_zeros_with_flipped_sign_count_as_changed_without_drift(publish_tables: Publish) -> None:
    before, after = with_rows({5: 0.0}), with_rows({5: -0.0})
    rows = row_diff_of(compare(publish_tables({"t": before}), publish_tables({"t": after})))
    assert (rows.rows_changed, rows.rows_from_zero) == (1, 0)
    assert (rows.relative_l2_max, rows.row_max, rows.cosine_mean) == (0, 5, 1)


def test_drift_is_computed_for_rows_whose_squares_overflow_float32(publish_tables: Publish) -> None:
    before, after = with_rows({0: 1e30}), with_rows({0: -1e30})
    rows = row_diff_of(compare(publish_tables({"t": before}), publish_tables({"t": after})))
    assert rows.relative_l2_max == pytest.approx(2)
    assert rows.cosine_mean == pytest.approx(-1)


def test_cosine_of_zero_vectors_is_one_and_of_one_zero_vector_zero() -> None:
    a = np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    b = np.array([[0.0, 0.0], [0.0, 0.0], [0.0, 5.0]])
    assert cosines(a, b).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
def test_small_dtypes_are_compared_by_bytes(publish_tables: Publish, dtype: str) -> None:
    after = with_rows({9: BASE[9] * 3})
    found = compare(
        publish_tables({"t": BASE}, dtype=dtype), publish_tables({"t": after}, dtype=dtype)
    )
    rows = row_diff_of(found)
    assert (rows.rows_changed, rows.row_max) == (1, 9)
    assert rows.relative_l2_max == pytest.approx(2, rel=0.1)


def test_comparison_in_blocks_equals_the_whole_comparison(
    publish_tables: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(0)
    before = torch.randn(1000, 8, generator=random)
    after = before + torch.randn(1000, 8, generator=random) * (torch.arange(1000) % 3 == 0)[:, None]
    a, b = publish_tables({"t": before}), publish_tables({"t": after})
    whole = row_diff_of(compare(a, b))
    monkeypatch.setattr(row_diff, "BLOCK_BYTES", 64 * 7)
    calls: list[tuple[str, int, int, int]] = []
    found = compare(a, b, lambda *call: calls.append(call))
    blocks = row_diff_of(found)
    assert len(calls) == -(-1000 // 7)
    assert calls[-1] == ("t", 1000, 1000, b.manifest.nbytes)
    assert (blocks.rows_changed, blocks.row_max) == (334, whole.row_max)
    distance = (after - before).norm(dim=1) / before.norm(dim=1)
    changed = torch.arange(1000) % 3 == 0
    expected = float(distance[changed].mean()), float(distance.max())
    for found_rows in (whole, blocks):
        measured = found_rows.relative_l2_mean, found_rows.relative_l2_max
        np.testing.assert_allclose(measured, expected, rtol=1e-5)
