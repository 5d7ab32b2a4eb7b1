"""Tests of the names of parts."""

import pytest

from embedserve_store.parts.part import NO_ROWS, LocalTables, Part


def test_part_name_round_trips_as_number_and_count() -> None:
    assert Part.parse("3/8") == Part(3, 8)
    assert str(Part(3, 8)) == "3/8"
    assert Part.parse(str(Part(0, 1))) == Part(0, 1)
    assert Part(3, 8).cache_suffix == "-part-3-of-8"
    assert LocalTables(0) == NO_ROWS
    assert LocalTables(5).cache_suffix == "-tables-of-5-bytes"


@pytest.mark.parametrize("text", ["", "3", "3/", "/8", "a/8", "-1/8", "3/8/9", " 3/8", "03/8"])
def test_malformed_part_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=f"part is {text!r}, expected NUMBER/COUNT"):
        Part.parse(text)


@pytest.mark.parametrize("text", ["8/8", "9/8"])
def test_part_number_beyond_the_count_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=f"part is {text}, expected a number from 0 to 7"):
        Part.parse(text)
