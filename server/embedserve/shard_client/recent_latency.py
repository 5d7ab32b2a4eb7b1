"""Quantiles of recent latencies, and the delays that follow from them."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import log2

BUCKETS_PER_OCTAVE = 8
BUCKETS = 27 * BUCKETS_PER_OCTAVE
"""Buckets from 1 microsecond to 2 minutes, each 9 % wide."""
BOUNDS_S = [2 ** ((bucket + 1) / BUCKETS_PER_OCTAVE) * 1e-6 for bucket in range(BUCKETS)]
SAMPLES_PER_UPDATE = 64
"""Latencies after which the quantiles are computed again."""
DECAY = 0.9
"""Factor of the former counts at each update: the quantiles are those of about the last 640
latencies."""
QUANTILE = 0.95
"""Share of the calls that are not slow."""
DELAY_AT_START_S = 5e-3
"""Assumed quantiles before the first update."""
HEDGE_S_MIN = 1e-3
"""Shortest call that counts as slow."""
HUNG_FACTOR = 10
"""Quantiles after which a call hangs."""
HUNG_S_MIN = 0.05
"""Shortest call that hangs."""


class RecentLatency:
    """Quantiles of recent latencies.

    Attributes:
        hedge_s: seconds after which a call is slow: the quantile of the latencies, at least twice
            the median and 1 ms.
        hung_s: seconds after which a call hangs: ten times the quantile, at least 50 ms.
    """

    def __init__(self) -> None:
        self._counts = [0.0] * BUCKETS
        self._new = 0
        self.hedge_s = self.hung_s = 0.0
        self._set_delays(DELAY_AT_START_S, DELAY_AT_START_S)

    def add(self, seconds: float) -> None:
        """Adds a latency. The calls that were given up count with the time until then."""
        bucket = int(BUCKETS_PER_OCTAVE * log2(max(1.0, seconds * 1e6)))
        self._counts[min(bucket, BUCKETS - 1)] += 1
        self._new += 1
        if self._new >= SAMPLES_PER_UPDATE:
            self._new = 0
            self._update()

    def _update(self) -> None:
        passed = list(accumulate(self._counts))
        median, quantile = (
            bisect_left(passed, passed[-1] * fraction) for fraction in (0.5, QUANTILE)
        )
        self._set_delays(BOUNDS_S[median], BOUNDS_S[quantile])
        self._counts = [count * DECAY for count in self._counts]

    def _set_delays(self, median_s: float, quantile_s: float) -> None:
        self.hedge_s = max(quantile_s, 2 * median_s, HEDGE_S_MIN)
        self.hung_s = max(HUNG_FACTOR * quantile_s, HUNG_S_MIN)
