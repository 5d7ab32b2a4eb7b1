"""String ids as the integers that stand for them, in requests and in stored vocabularies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def hash_strings(strings: Sequence[str]) -> NDArray[np.int64]:
    """The ids [n] that stand for ``strings``: XXH3 (64 bits, seed 0) of their UTF-8.

    Two of n strings have one hash with probability n**2 / 2**65, 3e-6 for ten million: such a
    vocabulary is refused when it is read. A string that is not in it is taken for one of its n
    with probability n / 2**64. XXH3 is no secret: who wants to can make a string that is taken
    for another, and gets that one's row.
    """
    from xxhash import xxh3_64_intdigest  # here, for models without strings to do without it

    try:
        hashes = list(map(xxh3_64_intdigest, map(str.encode, strings)))
    except UnicodeEncodeError:
        # JSON may hold half a surrogate pair, which UTF-8 proper has no bytes for.
        hashes = [xxh3_64_intdigest(one.encode("utf-8", "surrogatepass")) for one in strings]
    return np.array(hashes, np.uint64).view(np.int64)
