"""Rate limits for log lines that untrusted clients can cause: the first few lines of each kind in a
period are logged, the rest are counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from time import monotonic

PERIOD_S = 10.0
"""Seconds of a period; each kind of line has its limit per period."""
SHOWN_CHARACTERS_MAX = 300
"""Characters of a line's detail, which may quote a caller."""
TRACEBACKS_MAX = 3
"""Tracebacks logged in PERIOD_S for one type of error from one place in the code."""

Fields = Mapping[str, object]
"""Named values of a log line, which a formatter appends to the line or writes as JSON."""


class LineLimit:
    """Limit on the lines of each kind in PERIOD_S, and the count of those beyond it. Threads may
    share it; lines of the same moment may be counted as one."""

    def __init__(self, lines: int) -> None:
        self._lines = lines
        self._end_s: dict[Hashable, float] = {}  # end of the current period of each kind
        self._counts: dict[Hashable, int] = {}  # lines of each kind in its current period

    def take(self, kind: Hashable) -> int | None:
        """Counts a line of ``kind``; there are few kinds.

        Returns:
            Number of lines of this kind left out before this line, or None if this line is to be
                left out.
        """
        now_s = monotonic()
        left_out = 0
        if now_s >= self._end_s.get(kind, 0.0):
            left_out = max(0, self._counts.get(kind, 0) - self._lines)
            self._counts[kind] = 0
            self._end_s[kind] = now_s + PERIOD_S  # last: from here on other threads only count
        self._counts[kind] += 1
        return None if self._counts[kind] > self._lines else left_out


class RateLimitedTracebacks(logging.Filter):
    """Log filter that limits the tracebacks from each place in the code, so that a client that
    triggers the same error repeatedly cannot fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = LineLimit(TRACEBACKS_MAX)

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.exc_info:
            return True
        left_out = self._limit.take((record.pathname, record.lineno, record.exc_info[0]))
        if left_out:
            record.msg = f"{record.getMessage()}{more_like_it(left_out)}"
            record.args = None
        return left_out is not None


class RateLimitedLogger:
    """Logger with a limit for each kind of message in PERIOD_S; the next line reports how many were
    left out.

    Text from a caller is logged as ASCII, so that it cannot pass for another log line.
    """

    def __init__(self, logger: logging.Logger, lines: int = 1) -> None:
        """``lines`` is the number of messages of one kind logged in PERIOD_S."""
        self._logger = logger
        self._limit = LineLimit(lines)

    def log(
        self,
        level: int,
        kind: str,
        detail: str = "",
        *,
        with_traceback: bool = False,
        fields: Callable[[], Fields] | None = None,
    ) -> None:
        """Logs ``kind``, one of a few fixed texts, followed by the ``detail`` of this occurrence.

        Args:
            with_traceback: whether to log the traceback of the exception being handled.
            fields: returns further named values; called only if the line is logged.
        """
        left_out = self._limit.take(kind)
        if left_out is None or not self._logger.isEnabledFor(level):
            return
        more = more_like_it(left_out)
        shown = f": {ascii(detail[:SHOWN_CHARACTERS_MAX])[1:-1]}" if detail else ""
        extra = None if fields is None else {"fields": fields()}
        self._logger.log(level, "%s%s%s", kind, shown, more, exc_info=with_traceback, extra=extra)


def more_like_it(left_out: int) -> str:
    """Returns the suffix of a log line that reports how many lines were left out before it."""
    return f" ({left_out} more like it since the last line)" if left_out else ""
