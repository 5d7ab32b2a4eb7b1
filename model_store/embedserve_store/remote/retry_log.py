"""Logs the retries that botocore does by itself, so that short outages of S3 leave a trace.

Listens to the client that s3fs has; changes nothing of what is retried.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

logger = logging.getLogger(__name__)

LOG_S = 60.0
"""Seconds between two lines: a long outage fails each call, several times."""
SERVER_ERROR = 500
"""HTTP statuses from here on are the store's faults, which clients retry."""
UNIQUE_ID = "embedserve-retry-log"


class RetryLog:
    """A listener to the events of a botocore client; one for each client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged_s: float | None = None
        self._unlogged = 0

    def listen(self, events: Any) -> None:
        """Listens to ``events`` from now on, unless another RetryLog does."""
        events.register("needs-retry.s3", self.on_response, unique_id=UNIQUE_ID)

    def on_response(
        self,
        attempts: int,
        response: Any = None,
        caught_exception: Exception | None = None,
        request_dict: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Logs a failed attempt, at most one in LOG_S. Returns None: has no say in retries."""
        reason = _reason(response, caught_exception)
        if reason is None:
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
    """Returns why an attempt failed; None where it did not, or by the caller's fault."""
    if error is not None:
        return " ".join(str(error).split()) or type(error).__name__
    status = 0 if response is None else response[0].status_code
    return f"HTTP status {status}" if status >= SERVER_ERROR else None
