"""Tests of the log of the S3 client's retries, which has few lines."""

import logging
from types import SimpleNamespace

import pytest
from server.python import run_python

from embedserve_store.remote import retry_log
from embedserve_store.remote.retry_log import RetryLog

URL = "http://host/bucket/key?secret=1"


def failed(log: RetryLog, status: int = 503, attempts: int = 1) -> None:
    response: tuple[SimpleNamespace, dict[str, str]] = (SimpleNamespace(status_code=status), {})
    log.on_response(attempts, response, None, {"url": URL}, operation="")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now_s)
    return clock


def test_retry_log_is_rate_limited_and_counts_suppressed_lines(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    log = RetryLog()
    with caplog.at_level(logging.WARNING):
        for attempt in range(1, 6):
            failed(log, attempts=attempt)
        clock.now_s += retry_log.LOG_S
        log.on_response(2, None, ConnectionError("no\nroute"), {"url": URL})
    assert caplog.messages == [
        "http://host/bucket/key: attempt 1 failed: HTTP status 503",
        "http://host/bucket/key: attempt 2 failed: no route; 4 more since the last line",
    ]


def test_calls_that_fail_at_the_end_of_the_interpreter_are_not_logged() -> None:
    code = (
        "import threading\n"
        "from embedserve_store.remote.retry_log import RetryLog\n"
        "def fail_at_the_end():\n"
        "    threading.main_thread().join()\n"
        "    RetryLog().on_response(1, None, ConnectionError('cut'), {})\n"
        "threading.Thread(target=fail_at_the_end).start()\n"
    )
    done = run_python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_responses_that_are_retried_are_logged(
    status: int, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    failed(RetryLog(), status)
    assert caplog.messages == [f"http://host/bucket/key: attempt 1 failed: HTTP status {status}"]


@pytest.mark.parametrize("status", [200, 403, 404])
def test_responses_that_are_no_store_fault_are_not_logged(
    status: int, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        failed(RetryLog(), status)
    assert caplog.messages == []
