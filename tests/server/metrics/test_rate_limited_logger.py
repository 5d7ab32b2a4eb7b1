"""Tests of the rate-limited logger: first one line, then one for many. A caller's text cannot break
the line."""

import logging
from collections.abc import Callable, Hashable
from itertools import count
from time import monotonic

import pytest

from embedserve.metrics import rate_limited_logger
from embedserve.metrics.rate_limited_logger import (
    PERIOD_S,
    SHOWN_CHARACTERS_MAX,
    TRACEBACKS_MAX,
    LineLimit,
    RateLimitedLogger,
    RateLimitedTracebacks,
)


class Clock:
    now_s = monotonic()

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rate_limited_logger, "monotonic", clock)
    return clock


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> RateLimitedLogger:
    caplog.set_level(logging.INFO)
    return RateLimitedLogger(logging.getLogger("quiet"))


def test_first_event_is_logged_and_suppressed_events_are_counted(
    log: RateLimitedLogger, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(1000):
        log.log(logging.INFO, "refused", f"id {i}")
    assert caplog.messages == ["refused: id 0"]
    clock.now_s += PERIOD_S
    log.log(logging.INFO, "refused", "id 1000")
    assert caplog.messages[1:] == ["refused: id 1000 (999 more like it since the last line)"]
    clock.now_s += PERIOD_S
    log.log(logging.INFO, "refused")
    assert caplog.messages[2:] == ["refused"]


def test_kinds_of_events_are_limited_separately(
    log: RateLimitedLogger, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        log.log(logging.INFO, "refused", "why")
        log.log(logging.WARNING, "cut", "who")
    assert caplog.messages == ["refused: why", "cut: who"]
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]


def test_caller_text_is_escaped_and_truncated_to_one_line(
    log: RateLimitedLogger, caplog: pytest.LogCaptureFixture
) -> None:
    log.log(logging.INFO, "refused", "a\n2026 ERROR all is lost\x1b[2J \u202e" + "x" * 10_000)
    (line,) = caplog.messages
    assert line.startswith("refused: a\\n2026 ERROR all is lost\\x1b[2J \\u202e")
    assert line.isascii()
    assert len(line) < 2 * SHOWN_CHARACTERS_MAX


def test_repeated_traceback_is_logged_once(
    log: RateLimitedLogger, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            log.log(logging.ERROR, "a request failed", with_traceback=True)
    assert caplog.text.count("Traceback") == 1


def test_configured_number_of_lines_is_logged_per_kind(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log = RateLimitedLogger(logging.getLogger("quiet"), lines=3)
    numbers = count()
    for _ in range(100):
        log.log(logging.INFO, "slow", fields=lambda: {"number": next(numbers)})
    assert caplog.messages == ["slow"] * 3
    clock.now_s += PERIOD_S
    log.log(logging.INFO, "slow", fields=lambda: {"number": next(numbers)})
    assert caplog.messages[3:] == ["slow (97 more like it since the last line)"]
    # The logger did not compute the fields of suppressed lines.
    assert [vars(record)["fields"]["number"] for record in caplog.records] == [0, 1, 2, 3]


def test_tracebacks_of_one_code_location_are_limited_and_counted(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("any.library")
    caplog.handler.addFilter(quiet := RateLimitedTracebacks())

    def fail_at(path: str) -> None:
        try:
            raise ValueError(path)
        except ValueError:
            logger.exception("%s failed", path)

    try:
        for i in range(1000):
            fail_at(f"/{i}")
            logger.error("no traceback")
        assert caplog.messages.count("no traceback") == 1000
        kept = [message for message in caplog.messages if message != "no traceback"]
        assert kept == [f"/{i} failed" for i in range(TRACEBACKS_MAX)]
        clock.now_s += PERIOD_S
        fail_at("/last")
    finally:
        caplog.handler.removeFilter(quiet)
    left_out = 1000 - TRACEBACKS_MAX
    assert caplog.messages[-1] == f"/last failed ({left_out} more like it since the last line)"


class Interrupted(dict[Hashable, float]):
    """Dictionary that calls ``interrupt`` once, after its first change, as another thread may."""

    interrupt: Callable[[], object] | None = None

    def __setitem__(self, key: Hashable, value: float) -> None:
        super().__setitem__(key, value)
        if self.interrupt is not None:
            interrupt, self.interrupt = self.interrupt, None
            interrupt()


@pytest.mark.parametrize("name", ["_end_s", "_counts"])
def test_two_threads_may_log_the_first_line_of_a_kind(name: str) -> None:
    """Covers the threads of a large batch, which fail together. An error of the log would replace
    theirs, and the batch would never end."""
    quota = LineLimit(1)
    changed = Interrupted()
    setattr(quota, name, changed)
    taken: list[int | None] = []
    changed.interrupt = lambda: taken.append(quota.take("kind"))
    taken.append(quota.take("kind"))
    assert 0 in taken
    assert len(taken) == 2
    assert quota.take("kind") is None
