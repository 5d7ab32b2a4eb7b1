"""Logs what strangers can cause: a few lines at first, then one for many."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from time import monotonic

PERIOD_S = 10.0
"""In which so many lines of one kind are said."""
SHOWN_CHARACTERS_MAX = 300

Fields = Mapping[str, object]
"""What a line tells by name, for a formatter to append or to write as JSON."""


class QuietLog:
    """Says something of each kind so many times in PERIOD_S, and then how much was left out.

    What a caller wrote is shown as ASCII, so that it cannot pass for another line.
    """

    def __init__(self, logger: logging.Logger, lines: int = 1) -> None:
        """``lines`` are said of a kind in PERIOD_S."""
        self._logger = logger
        self._lines = lines
        self._end_s: dict[str, float] = {}  # of the period of each kind
        self._said: dict[str, int] = {}  # in it, or wanted to be

    def say(
        self,
        level: int,
        kind: str,
        detail: str = "",
        *,
        with_traceback: bool = False,
        fields: Callable[[], Fields] | None = None,
    ) -> None:
        """Says ``kind``, one of a few, and the ``detail`` of this time.

        Args:
            with_traceback: of the error that is being handled.
            fields: what else it tells; asked only if the line is said.
        """
        now_s = monotonic()
        left_out = 0
        if now_s >= self._end_s.get(kind, 0.0):
            self._end_s[kind] = now_s + PERIOD_S
            left_out = max(0, self._said.get(kind, 0) - self._lines)
            self._said[kind] = 0
        self._said[kind] += 1
        if self._said[kind] > self._lines or not self._logger.isEnabledFor(level):
            return
        more = f" ({left_out} more like it since the last line)" if left_out else ""
        shown = f": {ascii(detail[:SHOWN_CHARACTERS_MAX])[1:-1]}" if detail else ""
        extra = None if fields is None else {"fields": fields()}
        self._logger.log(level, "%s%s%s", kind, shown, more, exc_info=with_traceback, extra=extra)
