"""Logging of a server's processes: handler and formatters of the lines, which go to stderr.

A line is text for people, or a JSON object for log collectors.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

import orjson

from embedserve.metrics.log_stream import LogHandler, unblock_output
from embedserve.metrics.rate_limited_logger import RateLimitedTracebacks
from embedserve_store.terminal.console import hush_torch
from embedserve_store.terminal.sanitize import sanitize

INDENT = "    "
"""Indentation of each line of a traceback."""
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_UNPRINTABLE = re.compile(r"[^ -~]")
"""Characters in JSON output that may be unprintable. ASCII control characters are already escaped
in JSON."""
_PLAIN = re.compile(r"[!#-~]+")


def set_up_logging(level: str, log_format: str = "text") -> None:
    """Sets up the logging of this process and of the processes that it forks; ``log_format`` is
    text or json."""
    unblock_output()
    faulthandler.enable()  # writes the stacks of a process that a signal such as SIGBUS ends
    # torchrec and FBGEMM log at length how they were built; only their warnings are shown.
    logging.basicConfig(level=logging.WARNING, handlers=[log_handler(log_format)])
    for ours in ("embedserve", "embedserve_store"):
        logging.getLogger(ours).setLevel(level.upper())
    hush_torch()


def log_handler(log_format: str, stream: TextIO | None = None) -> logging.Handler:
    """Returns the handler of all log lines, which writes to ``stream`` or stderr; ``log_format`` is
    text or json."""
    handler = LogHandler(stream)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    handler.addFilter(RateLimitedTracebacks())
    return handler


class TextLines(logging.Formatter):
    """Formats a record as its text, followed by its fields as NAME=VALUE.

    Characters that would move a terminal's cursor or end the line are escaped. The lines of a
    traceback are indented, so that none of them can pass for a record.
    """

    def __init__(self) -> None:
        super().__init__(TEXT)

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record)
        shown = [f" {name}={_text(value)}" for name, value in _fields(record).items()]
        lines = [sanitize("".join((self.formatMessage(record), *shown)))]
        if record.exc_info:
            below = self.formatException(record.exc_info).split("\n")
            lines += [f"{INDENT}{sanitize(line)}" for line in below]
        return "\n".join(lines)


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object: time (ISO 8601, UTC), level, logger, message and the
    record's named fields. A record with an exception also has its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        # Libraries may log surrogates, which are not valid UTF-8 and which orjson rejects.
        safe = {name: _without_surrogates(value) for name, value in line.items()}
        return _UNPRINTABLE.sub(_json_escape, orjson.dumps(safe, default=str).decode())


def _json_escape(found: re.Match[str]) -> str:
    one = found[0]
    return one if one.isprintable() else json.dumps(one)[1:-1]


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return fields


def _text(value: object) -> str:
    """Returns the value as one word. A value with spaces, quotation marks or non-ASCII characters,
    such as untrusted text, is quoted."""
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return shown if _PLAIN.fullmatch(shown) else json.dumps(shown)


def _without_surrogates(value: object) -> object:
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
