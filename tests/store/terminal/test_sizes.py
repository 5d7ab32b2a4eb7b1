"""Tests of byte counts as people write them. Docstrings have examples of those that they read."""

import pytest

from embedserve_store.terminal.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GB", 80_000_000_000),
        ("24GiB", 24 << 30),
        ("24 gib", 24 << 30),
        ("1.5kb", 1500),
        ("512MiB", 512 << 20),
        ("2TB", 2 * 10**12),
        ("4096", 4096),
        ("1 B", 1),
    ],
)
def test_sizes_are_parsed_with_and_without_units(text: str, count: int) -> None:
    assert parse_bytes(text, "size") == count


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "80 apples", "1e9", "0", "0.1B", "9" * 400])
def test_invalid_size_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"^size is .*, expected a size such as 80GB"):
        parse_bytes(text, "size")
