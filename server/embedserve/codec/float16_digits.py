"""float16 values as the float64 whose decimal digits are the fewest that say the float16.

orjson writes a float16 as the float32 that it equals: 0.099975586 where 0.1 reads back as the
same float16. It writes these float64s in the fewest digits. Never rounds: values come as float16.
"""

from __future__ import annotations

import numpy as np

INFINITY_BITS = 0x7C00
"""Of float16; below it are all values that are finite and not negative, above it is nan."""


def shortest_float16_repr(values: np.ndarray) -> np.ndarray:
    """float16 values as float64 of the same shape; what is not finite is nan."""
    doubles: np.ndarray = _DOUBLES[values.view(np.uint16)]
    return doubles


def _doubles() -> np.ndarray:
    """float64 [65536], by the bits of a float16; the upper half is negative."""
    finite = np.arange(INFINITY_BITS, dtype=np.uint16).view(np.float16)
    positive = np.full(2**15, np.nan)
    # numpy prints the fewest digits that tell a float16 from its neighbours.
    positive[:INFINITY_BITS] = [float(str(value)) for value in finite]
    return np.concatenate((positive, -positive))


_DOUBLES = _doubles()
