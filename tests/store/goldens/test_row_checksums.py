"""Tests of the checksums of rows: any change shows, and the checksums of column-wise shards add
up."""

import numpy as np
import pytest

from embedserve_store.goldens.row_checksums import row_checksums

ROWS = np.random.default_rng(4).standard_normal((50, 6)).astype(np.float32)


def test_any_changed_value_changes_only_the_checksum_of_its_row() -> None:
    before = row_checksums(ROWS)
    for row, column in np.ndindex(*ROWS.shape):
        changed = ROWS.copy()
        changed[row, column] = np.nextafter(changed[row, column], np.float32(9))
        (different,) = np.flatnonzero(row_checksums(changed) != before)
        assert different == row


def test_reordered_values_change_the_checksum() -> None:
    assert (row_checksums(ROWS[:, ::-1]) != row_checksums(ROWS)).all()


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_checksums_of_column_wise_shards_add_up(cut: int) -> None:
    parts = row_checksums(ROWS[:, :cut]) + row_checksums(ROWS[:, cut:], cut)
    np.testing.assert_array_equal(parts, row_checksums(ROWS))


def test_checksum_matches_the_documented_formula() -> None:
    (checksum,) = row_checksums(np.array([[1.0, -2.0]], np.float32))
    factors = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4 | 1)  # SplitMix64 with seed 0
    expected = 0x3F800000 * factors[0] + 0xC0000000 * factors[1]
    assert int(checksum) == expected % 2**64
