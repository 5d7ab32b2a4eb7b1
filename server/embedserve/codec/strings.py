"""Puts the hashes of string ids among the integer ids of one request; the same for both codecs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from embedserve_store.ids.string_hashes import hash_strings


class StringsByHash(Mapping[int, str]):
    """The strings of one request by their hashes, put in order once one is asked for: messages
    do, answers do not."""

    def __init__(self, hashes: np.ndarray, strings: list[str]) -> None:
        self._hashes = hashes
        self._strings = strings

    @cached_property
    def _by_hash(self) -> dict[int, str]:
        return dict(zip(self._hashes.tolist(), self._strings, strict=True))

    def __getitem__(self, value: int) -> str:
        return self._by_hash[value]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_hash)

    def __len__(self) -> int:
        return len(self._by_hash)


def merge(
    integers: np.ndarray, strings: list[str], is_string: Sequence[bool], counts: Sequence[int]
) -> tuple[np.ndarray, StringsByHash]:
    """(ids of all features, the strings by their hashes).

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
    return ids, StringsByHash(hashes, strings)
