"""Logs what strangers can cause: one line at first, then one for many."""

from __future__ import annotations

import logging
from time import monotonic

PERIOD_S = 10.0
"""Between two lines of one kind."""
SHOWN_CHARACTERS_MAX = 300


class QuietLog:
    """Says something of each kind at most once in PERIOD_S, and then how much was left out.

    What a caller wrote is shown as ASCII, so that it cannot pass for another line.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._next_s: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def say(self, level: int, kind: str, detail: str = "", *, with_traceback: bool = False) -> None:
        """Says ``kind``, one of a few, and the ``detail`` of this time.

        Args:
            with_traceback: of the error that is being handled.
        """
        now_s = monotonic()
        if now_s < self._next_s.get(kind, 0.0):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._next_s[kind] = now_s + PERIOD_S
        left_out = self._left_out.pop(kind, 0)
        more = f" ({left_out} more like it since the last line)" if left_out else ""
        shown = f": {ascii(detail[:SHOWN_CHARACTERS_MAX])[1:-1]}" if detail else ""
        self._logger.log(level, "%s%s%s", kind, shown, more, exc_info=with_traceback)
