"""Logs the retries that botocore performs, so that short outages of S3 appear in the log.

Listens to events of the client that s3fs uses. Does not affect retries.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from embedserve_store.remote.store_errors import one_line

logger = logging.getLogger(__name__)

LOG_S = 60.0
"""Minimum seconds between two log lines. During a long outage each call fails several times."""
SERVER_ERROR = 500
"""Lowest HTTP status that counts as an error of the store, which clients retry."""
TOO_MANY_REQUESTS = 429
"""Another status that clients retry; some stores throttle with it."""
UNIQUE_ID = "embedserve-retry-log"


class RetryLog:
    """Event listener of a botocore client. Each client has at most one RetryLog."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged_s: float | None = None
        self._unlogged = 0

    def listen(self, events: Any) -> None:
        """Registers for ``events``, unless another RetryLog is registered."""
        events.register("needs-retry.s3", self.on_response, unique_id=UNIQUE_ID)

    def on_response(
        self,
        attempts: int,
        response: Any = None,
        caught_exception: Exception | None = None,
        request_dict: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Logs a failed attempt, at most once per LOG_S.

        At the end of the interpreter, as after Ctrl-C, calls in flight fail and are not logged.
        Returns None, so that botocore's own rules decide about retries.
        """
        reason = _reason(response, caught_exception)
        if reason is None or not threading.main_thread().is_alive():
            return
        with self._lock:
            now_s = time.monotonic()
            if self._logged_s is not None and now_s - self._logged_s < LOG_S:
                self._unlogged += 1
                return
            self._logged_s, unlogged, self._unlogged = now_s, self._unlogged, 0
        url = str((request_dict or {}).get("url", "s3")).partition("?")[0]
        more = f"; {unlogged} more since the last line" if unlogged else ""
        logger.warning("%s: attempt %d failed: %s%s", url, attempts, reason, more)


def _reason(response: Any, error: Exception | None) -> str | None:
    """Returns why an attempt failed; None if it succeeded or the caller is at fault."""
    if error is not None:
        return one_line(error)
    status = 0 if response is None else response[0].status_code
    is_retried = status >= SERVER_ERROR or status == TOO_MANY_REQUESTS
    return f"HTTP status {status}" if is_retried else None
