"""Converts float16 values to the float64 values with the shortest decimal representation.

orjson writes a float16 as the equal float32: 0.099975586, although 0.1 reads back as the same
float16. It writes the float64 values of this module in the fewest digits. Values are never rounded,
because they already are float16.
"""

from __future__ import annotations

import numpy as np

INFINITY_BITS = 0x7C00
"""Bits of the float16 infinity. Smaller bit patterns are the finite, non-negative values; larger
ones below the sign bit are NaN."""


def shortest_float16_repr(values: np.ndarray) -> np.ndarray:
    """Returns float16 ``values`` as float64 of the same shape. Values that are not finite become
    NaN."""
    doubles: np.ndarray = _DOUBLES[values.view(np.uint16)]
    return doubles


def _doubles() -> np.ndarray:
    """Returns the lookup table, float64 [65536], indexed by the bits of a float16. The upper half
    has the negative values."""
    finite = np.arange(INFINITY_BITS, dtype=np.uint16).view(np.float16)
    positive = np.full(2**15, np.nan)
    # numpy prints the fewest digits that distinguish a float16 from its neighbours.
    positive[:INFINITY_BITS] = [float(str(value)) for value in finite]
    return np.concatenate((positive, -positive))


_DOUBLES = _doubles()
