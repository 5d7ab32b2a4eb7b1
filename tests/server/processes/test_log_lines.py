"""Tests of log lines: each record is one line, or one object, whatever text untrusted clients
send."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from embedserve.processes.logging_setup import JsonLines, TextLines

FIELDS = {"request_id": "a7", "model": 'x outcome="OK"\n\x1b\udc80', "total_ms": 12.5, "ids": 3}


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.getLogger("lines")
    logger.propagate = False
    yield logger
    logger.handlers.clear()


def capture_log(log: logging.Logger, formatter: logging.Formatter) -> io.StringIO:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    log.addHandler(handler)
    return stream


def test_text_line_has_fields_after_the_message(log: logging.Logger) -> None:
    stream = capture_log(log, TextLines())
    log.warning("slow %s", "request", extra={"fields": FIELDS})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(
        ' WARNING lines: slow request request_id=a7 model="x outcome=\\"OK\\"\\n\\u001b\\udc80" '
        "total_ms=12.5 ids=3"
    )


def test_text_line_without_fields_has_only_the_message(log: logging.Logger) -> None:
    stream = capture_log(log, TextLines())
    log.error("gone")
    assert stream.getvalue().endswith(" ERROR lines: gone\n")


def test_json_log_has_one_object_per_line(log: logging.Logger) -> None:
    stream = capture_log(log, JsonLines())
    log.warning("slow %s\n", "request", extra={"fields": FIELDS})
    try:
        raise ZeroDivisionError("why")
    except ZeroDivisionError:
        log.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first.pop("time").endswith("+00:00")
    fields = {**FIELDS, "model": 'x outcome="OK"\n\x1b\\udc80'}
    assert first == {
        "level": "warning",
        "logger": "lines",
        "message": "slow request\n",
        **fields,
    }
    assert second["message"] == "failed"
    assert second["traceback"].endswith("ZeroDivisionError: why")


FORGED = "/a\n2026-11-24 12:00:00,000 ERROR all is lost\x1b[2J\x9b2J\u202e\u2028"


def fail(message: str) -> None:
    raise ValueError(message)


def log_failure(log: logging.Logger) -> None:
    try:
        fail(FORGED)
    except ValueError:
        log.exception("%s failed", FORGED)


def test_client_text_forges_no_log_line_and_moves_no_cursor(log: logging.Logger) -> None:
    stream = capture_log(log, TextLines())
    log_failure(log)
    text = stream.getvalue()
    first, *others = text.removesuffix("\n").split("\n")
    assert "ERROR lines: /a\\x0a2026" in first
    assert len(others) > 3
    assert all(line.startswith("    ") for line in others)
    assert text.replace("\n", "").isprintable()


def test_client_text_in_json_log_moves_no_cursor(log: logging.Logger) -> None:
    stream = capture_log(log, JsonLines())
    log_failure(log)
    text = stream.getvalue()
    assert text.removesuffix("\n").isprintable()
    line = json.loads(text)
    assert line["message"] == f"{FORGED} failed"
    assert line["traceback"].endswith(f"ValueError: {FORGED}")
