"""Wall clock for token expiry. A jump of the system clock counts only after it has lasted five
minutes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

JUMP_S = 5.0
"""Seconds of difference from the system clock above which it has jumped. The difference is measured
about every second, and regular clock correction is slower than that."""
LASTS_S = 300.0
"""Seconds after which a jump of the system clock is accepted."""


class JumpTolerantClock:
    """Unix time from a monotonic clock, with an offset that follows the system clock."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._steady = steady
        self._offset_s = wall() - steady()
        self._jump_s = 0.0
        """Seconds by which the system clock jumped ahead of this clock; 0 if it has not jumped."""
        self._jumped_s = 0.0

    def now_s(self) -> float:
        return self._steady() + self._offset_s

    def refresh(self) -> None:
        """Adjusts the offset to the system clock; called about every second."""
        steady_s = self._steady()
        difference_s = self._wall() - steady_s - self._offset_s
        if abs(difference_s) <= JUMP_S:
            self._offset_s += difference_s
            if self._jump_s:
                logger.warning("the host's clock is back where it was")
            self._jump_s = 0.0
        elif abs(difference_s - self._jump_s) > JUMP_S:
            self._jump_s, self._jumped_s = difference_s, steady_s
            logger.warning(
                "the host's clock has jumped by %.0f s: what expires goes by the time before for "
                "%.0f s, and then by the new one",
                difference_s,
                LASTS_S,
            )
        elif steady_s - self._jumped_s >= LASTS_S:
            self._offset_s += difference_s
            self._jump_s = 0.0
            logger.warning("the host's clock stays where it jumped: what expires goes by it")
