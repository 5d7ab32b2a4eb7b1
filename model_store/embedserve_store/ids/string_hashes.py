"""Hashes string ids to int64, for requests and for stored vocabularies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError


def hash_strings(strings: Sequence[str], where: str = "ids") -> NDArray[np.int64]:
    """Returns the int64 ids [n] of ``strings``: XXH3 (64 bits, seed 0) of their UTF-8.

    The probability that two of n strings collide is n**2 / 2**65, or 3e-6 for ten million. Reading
    a vocabulary with a collision fails. A string outside a vocabulary of n strings collides with an
    entry with probability n / 2**64. XXH3 has no secret key, so an untrusted client can construct a
    string that collides with another string, and gets the row of that string.

    Raises:
        InvalidModelError: a string has half of a surrogate pair, as JSON may. It has no UTF-8, so
            no request could name it.
    """
    from xxhash import xxh3_64_intdigest  # imported here: models without strings do not need it

    try:
        hashes = list(map(xxh3_64_intdigest, map(str.encode, strings)))
    except UnicodeEncodeError as error:
        raise InvalidModelError(
            f"{where}: {error.object!r:.80} is no text: half of a surrogate pair"
        ) from error
    return np.array(hashes, np.uint64).view(np.int64)
