"""Merges the hashes of string ids into the integer ids of a request, for every codec.

Strings may also represent integers, because JavaScript numbers are exact only up to 2**53. Only the
table determines how strings are read, so both readings are kept until the model is known.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedserve_store.ids.string_hashes import hash_strings

INLINE_STRINGS_MAX = 2048
"""Strings that are parsed as integers on the event loop's thread, in a fraction of a millisecond.
Up to this many are parsed lazily, only if a table has integer ids."""
CHUNK = 256
"""Number of strings that are parsed together. The strings of a chunk are parsed individually only
where a string is not an integer."""
CHARACTERS_MAX = len("-9223372036854775808,")
_INTEGERS = msgspec.json.Decoder(list[int])
_INTEGER_CHARACTERS = b"0123456789-,"


def integers_of(strings: Sequence[str]) -> NDArray[np.int64] | int:
    """Returns the integers that ``strings`` represent, int64 [n], or the position of the first
    invalid string.

    Each string must be an integer as JSON writes it: "-7", but not "+7", " 7", "07" or "7.0". A
    string of more than 64 bits is invalid, too.
    """
    if strings and _read(strings[:1]) is None:
        return 0  # the strings are names, which may be long: parse no more of them
    integers = _read(strings)
    if integers is not None:
        return integers
    start = 0
    while _read(strings[start : start + CHUNK]) is not None:
        start += CHUNK
    return next(at for at in range(start, len(strings)) if _read(strings[at : at + 1]) is None)


def _read(strings: Sequence[str]) -> NDArray[np.int64] | None:
    text = ",".join(strings)
    if not text.isascii() or len(text) > CHARACTERS_MAX * len(strings):
        return None
    octets = text.encode()
    if octets.translate(None, _INTEGER_CHARACTERS):
        return None
    try:
        integers = array("q", _INTEGERS.decode(b"[%b]" % octets))
    except (msgspec.DecodeError, OverflowError):
        return None
    return np.frombuffer(integers, np.int64) if len(integers) == len(strings) else None


class HashedStrings(Mapping[int, str]):
    """The strings of a request by their hashes, for error messages, and the integers they
    represent."""

    def __init__(
        self, hashes: NDArray[np.int64], strings: list[str], counts: Mapping[str, int]
    ) -> None:
        """Keeps the strings of several features.

        Args:
            counts: number of ids of each feature with string ids; the features' strings follow one
                another.
        """
        self._hashes = hashes
        self._strings = strings
        self._counts = counts

    @cached_property
    def integers(self) -> Mapping[str, NDArray[np.int64] | int]:
        """The result of integers_of for each feature."""
        found, start = {}, 0
        for feature, count in self._counts.items():
            found[feature] = integers_of(self._strings[start : start + count])
            start += count
        return found

    def __getitem__(self, value: int) -> str:
        positions = np.flatnonzero(self._hashes == value)
        if not positions.size:
            raise KeyError(value)
        return self._strings[int(positions[0])]

    def __iter__(self) -> Iterator[int]:
        return iter(dict.fromkeys(self._hashes.tolist()))

    def __len__(self) -> int:
        return len(set(self._hashes.tolist()))


def merge_string_ids(
    integers: np.ndarray,
    strings: list[str],
    features: Sequence[str],
    is_string: Sequence[bool],
    counts: Sequence[int],
) -> tuple[np.ndarray, HashedStrings]:
    """Returns (ids of all features, the strings by hash).

    Args:
        integers: int64, ids of the features with integer ids.
        strings: ids of the features with string ids.
        is_string: whether each feature has string ids.
        counts: number of ids of each feature.
    """
    hashes = hash_strings(strings)
    are_strings = np.repeat(is_string, counts)
    ids = np.empty(are_strings.size, np.int64)
    ids[are_strings] = hashes
    ids[~are_strings] = integers
    of_features = dict(compress(zip(features, counts, strict=True), is_string))
    string_ids = HashedStrings(hashes, strings, of_features)
    if len(strings) > INLINE_STRINGS_MAX:
        # Parse here, because requests this large are decoded off the event loop, while their model
        # is resolved on the event loop's thread.
        _ = string_ids.integers
    return ids, string_ids
