"""Checks of a request that need no model, for the codecs and for batching."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from embedserve.config import Limits
from embedserve.errors import InvalidRequestError, RequestTooLargeError, shortened

SEQ_MAX = 2**63 - 1
SEQ_DIGITS_MAX = 19
"""Decimal digits of SEQ_MAX."""
INTEGER_DIGITS_MAX = 640
"""Digits of the longest integer that Python parses, the lowest limit that it allows. It parses in a
time quadratic in the digits, and holds the interpreter lock: with its default of 4300, 32 MiB of
JSON stopped the event loop for a second."""


def check_feature_count(field: str, count: int, limits: Limits) -> None:
    """Raises RequestTooLargeError if ``count`` exceeds the limit on the features of a request."""
    if count > limits.request_features_max:
        raise RequestTooLargeError(
            f"{field} names {count} features, {limits.describe('request_features_max')}", field
        )


def check_unique(field: str, names: Sequence[str]) -> None:
    """Raises InvalidRequestError if one of ``names`` occurs twice."""
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise InvalidRequestError(f"{field} names {shortened(twice)!r} twice", field)


def check_lengths(lengths: np.ndarray, ids: int) -> None:
    """Raises InvalidRequestError unless ``lengths`` are non-negative and add up to ``ids``."""
    if lengths.size and lengths.min() < 0:
        position = int((lengths < 0).argmax())
        raise InvalidRequestError(
            f"lengths[{position}] is {lengths[position]}: a bag cannot hold fewer than 0 ids",
            f"lengths[{position}]",
        )
    total = int(lengths.sum(dtype=np.int64))
    if total != ids:
        raise InvalidRequestError(f"lengths add up to {total}, but there are {ids} ids", "lengths")


def check_min_seq(field: str, value: object) -> int:
    """Returns ``value``, the min_seq in ``field``. Raises InvalidRequestError unless it is an
    integer from 0 to SEQ_MAX."""
    if type(value) is int and 0 <= value <= SEQ_MAX:
        return value
    raise InvalidRequestError(
        f"{field} is {value!r:.64}, expected an integer from 0 to {SEQ_MAX}", field
    )


def parse_min_seq(field: str, text: str) -> int:
    """Returns the min_seq that ``field`` has as decimal digits. Raises InvalidRequestError as
    check_min_seq does."""
    is_number = text.isascii() and text.isdigit() and len(text) <= SEQ_DIGITS_MAX
    return check_min_seq(field, int(text) if is_number else text)


def find_bag(lengths: np.ndarray, position: int) -> tuple[int, int]:
    """Returns (bag, index in the bag) of the id at ``position``."""
    ends = np.cumsum(lengths, dtype=np.int64)
    bag = int(np.searchsorted(ends, position, side="right"))
    return bag, position - int(ends[bag]) + int(lengths[bag])
