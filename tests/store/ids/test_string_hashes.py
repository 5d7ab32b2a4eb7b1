"""Tests of the hashes of strings, which must never change."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedserve_store.errors import InvalidModelError
from embedserve_store.ids.string_hashes import hash_strings


def test_string_hashes_are_fixed_xxh3_values() -> None:
    # Stored versions contain these hashes. The first is XXH3's hash of no bytes,
    # 0x2d06800538d394c2.
    hashes = hash_strings(["", "a", "tt0114709", "Zürich"])
    assert hashes.dtype == np.int64
    assert hashes[0] == 0x2D06800538D394C2
    assert hashes.tolist() == [
        3244421341483603138,
        -1817709641818812897,
        103861909855936189,
        838883168505079630,
    ]


@settings(max_examples=50)
@given(st.lists(st.text(), unique=True, max_size=30))
def test_string_hash_is_unique_and_independent_of_the_batch(strings: list[str]) -> None:
    hashes = hash_strings(strings)
    assert len(set(hashes.tolist())) == len(strings)
    assert hashes.tolist() == [int(hash_strings([one])[0]) for one in strings]


def test_half_of_a_surrogate_pair_is_rejected() -> None:
    with pytest.raises(InvalidModelError, match=r"^ids: '\\udfff' is no text: half of a surrogate"):
        hash_strings(["a", "\udfff", "?"])
