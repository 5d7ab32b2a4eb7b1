"""Puts the hashes of string ids among the integer ids of one request; the same for every codec.

Strings may be integers, too: JavaScript has no others past 2**53. Which they are is the table's to
say, so both are kept until the model is known.
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

FEW = 2048
"""Strings that are read as integers in a fraction of a millisecond: only once a table wants it."""
CHUNK = 256
"""Strings that are looked at together; only where one is no integer, each alone."""
CHARACTERS_MAX = len("-9223372036854775808,")
_INTEGERS = msgspec.json.Decoder(list[int])
_OF_INTEGERS = b"0123456789-,"


def integers_of(strings: Sequence[str]) -> NDArray[np.int64] | int:
    """int64 [n], the integers that ``strings`` are, each written as JSON writes it ("-7", neither
    "+7" nor " 7", "07", "7.0"); or the position of the first that is none, or takes over 64 bits.
    """
    if strings and _read(strings[:1]) is None:
        return 0  # of names, which may be long, no more is looked at
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
    if octets.translate(None, _OF_INTEGERS):
        return None
    try:
        integers = array("q", _INTEGERS.decode(b"[%b]" % octets))
    except (msgspec.DecodeError, OverflowError):
        return None
    return np.frombuffer(integers, np.int64) if len(integers) == len(strings) else None


class HashedStrings(Mapping[int, str]):
    """The strings of one request by their hashes, for messages; and the integers that they are."""

    def __init__(
        self, hashes: NDArray[np.int64], strings: list[str], counts: Mapping[str, int]
    ) -> None:
        """``counts``: of the features that have them, one after the other."""
        self._hashes = hashes
        self._strings = strings
        self._counts = counts

    @cached_property
    def integers(self) -> Mapping[str, NDArray[np.int64] | int]:
        """integers_of each feature."""
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
    """(ids of all features, the strings).

    Args:
        integers: int64, ids of the features that have integers.
        strings: ids of the others.
        is_string, counts: of each feature, which it has and how many ids.
    """
    hashes = hash_strings(strings)
    are_strings = np.repeat(is_string, counts)
    ids = np.empty(are_strings.size, np.int64)
    ids[are_strings] = hashes
    ids[~are_strings] = integers
    of_features = dict(compress(zip(features, counts, strict=True), is_string))
    string_ids = HashedStrings(hashes, strings, of_features)
    if len(strings) > FEW:
        # Here, as so many are read in a thread, and their model is found on the event loop's.
        _ = string_ids.integers
    return ids, string_ids
