"""Tests of recognizing strings that stand for integers, against plain Python."""

import json
import re
import sys
from types import FrameType

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from embedserve.codec.string_ids import CHUNK, INLINE_STRINGS_MAX, integers_of, merge_string_ids
from embedserve_store.ids.string_hashes import hash_strings

INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
NEARLY = st.sampled_from(
    ["", "-", "+1", " 1", "1 ", "1.0", "1e2", "01", "-01", "--1", "1-2", "1,2", ",", "0x1", "1_0"]
    + ["\uff11", "\u0661", "²", "NaN", "null", "true", '"1"', "[1]", "]", "1\n", "\t1", "\0", "1\0"]
    + [str(2**63), str(-(2**63) - 1), "12345678901234567890", "9" * 5000, "-" * 30]
)
STRING = st.integers(-(2**63), 2**63 - 1).map(str) | NEARLY | st.text(max_size=3)


def integer_of(string: str) -> int | None:
    """Returns the 64-bit integer that ``string`` is in JSON; the reference."""
    if not INTEGER.fullmatch(string) or len(string) > 30:
        return None
    value = int(json.loads(string))
    return value if -(2**63) <= value < 2**63 else None


@given(strings=st.lists(STRING, max_size=6))
@example([])
@example(["1", ""])
@example(["-0"])
def test_integers_or_the_index_of_the_first_non_integer_are_returned(strings: list[str]) -> None:
    expected = list(map(integer_of, strings))
    found = integers_of(strings)
    if None in expected:
        assert found == expected.index(None)
    else:
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.tolist()) == (np.dtype(np.int64), expected)


@given(at=st.integers(0, 3 * CHUNK), wrong=NEARLY)
def test_single_non_integer_among_many_is_located(at: int, wrong: str) -> None:
    strings = [str(one) for one in range(3 * CHUNK)]
    strings.insert(at, wrong)
    assert integers_of(strings) == at


@pytest.mark.parametrize(
    "strings",
    [["7" * 4_000_000], ["1"] * 100_000 + ["7" * 1_000_000], ["1", *["\uff11"] * 131_071]],
    ids=["one long", "many and a long one", "none"],
)
def test_no_function_is_called_per_string(strings: list[str]) -> None:
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        found = integers_of(strings)
    finally:
        sys.setprofile(None)
    assert found == next(at for at, one in enumerate(strings) if integer_of(one) is None)
    assert calls < 10_000


@pytest.mark.parametrize("count", [3, INLINE_STRINGS_MAX + 1])
def test_strings_are_stored_by_hash_and_integers_by_feature(count: int) -> None:
    numbers = [str(one) for one in range(count)]
    names = ["Heat", "7"]
    ids, strings = merge_string_ids(
        np.array([5], np.int64),
        numbers + names,
        ("user", "day", "title"),
        (True, False, True),
        (count, 1, 2),
    )
    assert ids.tolist() == [*hash_strings(numbers), 5, *hash_strings(names)]
    assert {strings[value] for value in strings} == {*numbers, *names}
    assert len(strings) == len({*numbers, *names})
    is_read = "integers" in vars(strings)
    assert is_read == (count > INLINE_STRINGS_MAX)  # many are parsed in the codec thread
    assert np.array_equal(strings.integers["user"], np.arange(count))
    assert strings.integers["title"] == 0
    with pytest.raises(KeyError):
        strings[5]
