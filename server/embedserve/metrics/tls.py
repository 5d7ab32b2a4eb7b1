"""TLS metrics of all workers: handshakes by outcome, and the expiry of the server's certificate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from embedserve.metrics.families import Sample
from embedserve.metrics.shared_counters import WorkerCounters

HANDSHAKE_OUTCOMES = ("ok", "no_tls", "certificate", "failed", "too_large", "too_late", "gone")
"""Outcomes of a handshake. "ok": completed. "no_tls": the bytes received are not TLS.
"certificate": the client's certificate was not accepted. "failed": any other error on either side.
"too_large" and "too_late": over the limit on bytes or on time. "gone": abandoned by the client or
the server."""


class TlsMetrics:
    """TLS counters. They are updated on the event loop's thread.

    Attributes:
        handshakes: handshakes by outcome, of this process alone.
        expires_s: returns the expiry of the certificate that this process presents, in Unix time; 0
            if it presents none.
    """

    def __init__(self, counters: WorkerCounters) -> None:
        self.handshakes: Counter[str] = Counter()
        self.expires_s: Callable[[], float] = lambda: 0.0
        self._cells = counters.allocate(len(HANDSHAKE_OUTCOMES) + 1)
        self._before = self._cells.own[:-1].copy()

    def flush(self) -> None:
        self._cells.own[:-1] = self._before + [self.handshakes[one] for one in HANDSHAKE_OUTCOMES]
        self._cells.own[-1] = self.expires_s()

    def samples(self) -> Iterator[Sample]:
        """Yields the samples; there are none where TLS is not in use."""
        expires_s = self._cells.ready_rows()[:, -1]
        if expires_s.any():
            for outcome, count in zip(HANDSHAKE_OUTCOMES, self._cells.total(), strict=False):
                yield "embedserve_tls_handshakes", [outcome], float(count)
            earliest_s = float(expires_s[expires_s > 0].min())
            yield "embedserve_tls_certificate_expiry_timestamp_seconds", (), earliest_s
