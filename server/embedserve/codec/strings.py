"""Puts the hashes of string ids among the integer ids of one request; the same for both codecs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embedserve_store.ids.string_hashes import hash_strings


def merge(
    integers: np.ndarray, strings: list[str], is_string: Sequence[bool], counts: Sequence[int]
) -> tuple[np.ndarray, dict[int, str]]:
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
    return ids, dict(zip(hashes.tolist(), strings, strict=True))
