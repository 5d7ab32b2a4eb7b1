"""A budget of extra calls, as a share of all calls."""

from __future__ import annotations

BURST = 10.0
"""Extra calls that may be made in a burst."""


class ShareBudget:
    """A token bucket that calls refill, a share of a token each."""

    def __init__(self, share: float) -> None:
        """
        Args:
            share: extra calls allowed per call.
        """
        self._share = share
        self._left = BURST if share > 0 else 0.0

    def earn(self) -> None:
        """Counts a call."""
        self._left = min(BURST, self._left + self._share)

    def try_take(self) -> bool:
        """Takes an extra call from the budget. Returns False if none is left."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
