"""Lines of the log: as text for people, or each as one object of JSON for what collects them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime

import orjson

from embedserve_store.terminal.sanitize import sanitize

INDENT = "    "
"""Before each line of a traceback."""
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_UNPRINTABLE = re.compile(r"[^ -~]")
"""A character that may be, in JSON: those of ASCII are escaped there."""
_PLAIN = re.compile(r"[!#-~]+")


class TextLines(logging.Formatter):
    """Formats a record as its text, then its fields as NAME=VALUE.

    Characters that would move a terminal's cursor or end the line are escaped. A traceback's lines
    are indented, so that none of them can pass for a record.
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
    """An object with time (ISO 8601, UTC), level, logger, message and what the line tells by name;
    of an error also its traceback."""

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
        # Whatever a library logs: surrogates are no UTF-8, and orjson would not write them.
        safe = {name: _without_surrogates(value) for name, value in line.items()}
        return _UNPRINTABLE.sub(_json_escape, orjson.dumps(safe, default=str).decode())


def _json_escape(found: re.Match[str]) -> str:
    one = found[0]
    return one if one.isprintable() else json.dumps(one)[1:-1]


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return fields


def _text(value: object) -> str:
    """In one word: what is more, and what a stranger chose, stands in quotation marks."""
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return shown if _PLAIN.fullmatch(shown) else json.dumps(shown)


def _without_surrogates(value: object) -> object:
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
