"""Logs what strangers can cause: a few lines at first, then one for many."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from time import monotonic

PERIOD_S = 10.0
"""In which so many lines of one kind are said."""
SHOWN_CHARACTERS_MAX = 300
TRACEBACKS_MAX = 3
"""Logged in PERIOD_S from one place in the code, of one kind of error."""

Fields = Mapping[str, object]
"""What a line tells by name, for a formatter to append or to write as JSON."""


class Quota:
    """Counts lines of each kind, and allows so many of them in PERIOD_S."""

    def __init__(self, lines: int) -> None:
        self._lines = lines
        self._end_s: dict[Hashable, float] = {}  # of the period of each kind
        self._wanted: dict[Hashable, int] = {}  # in it

    def take(self, kind: Hashable) -> int | None:
        """Counts a line of ``kind``, one of a few.

        Returns:
            How many of its kind were left out before it, None where this one is to be left out.
        """
        now_s = monotonic()
        left_out = 0
        if now_s >= self._end_s.get(kind, 0.0):
            self._end_s[kind] = now_s + PERIOD_S
            left_out = max(0, self._wanted.get(kind, 0) - self._lines)
            self._wanted[kind] = 0
        self._wanted[kind] += 1
        return None if self._wanted[kind] > self._lines else left_out


class RateLimitedTracebacks(logging.Filter):
    """Limits the tracebacks that each place in the code logs: whatever an untrusted client finds to
    fail at, over and over, does not fill the log."""

    def __init__(self, lines: int = TRACEBACKS_MAX) -> None:
        """``lines`` are logged from a place in PERIOD_S."""
        super().__init__()
        self._quota = Quota(lines)

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.exc_info:
            return True
        left_out = self._quota.take((record.pathname, record.lineno, record.exc_info[0]))
        if left_out:
            record.msg = f"{record.getMessage()}{more_like_it(left_out)}"
            record.args = None
        return left_out is not None


class RateLimitedLogger:
    """Says something of each kind so many times in PERIOD_S, and then how much was left out.

    What a caller wrote is shown as ASCII, so that it cannot pass for another line.
    """

    def __init__(self, logger: logging.Logger, lines: int = 1) -> None:
        """``lines`` are said of a kind in PERIOD_S."""
        self._logger = logger
        self._quota = Quota(lines)

    def log(
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
        left_out = self._quota.take(kind)
        if left_out is None or not self._logger.isEnabledFor(level):
            return
        more = more_like_it(left_out)
        shown = f": {ascii(detail[:SHOWN_CHARACTERS_MAX])[1:-1]}" if detail else ""
        extra = None if fields is None else {"fields": fields()}
        self._logger.log(level, "%s%s%s", kind, shown, more, exc_info=with_traceback, extra=extra)


def more_like_it(left_out: int) -> str:
    """The end of a line, where lines were left out before it."""
    return f" ({left_out} more like it since the last line)" if left_out else ""
