"""What became of TLS handshakes, and when the server's certificate ends, for all workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from embedserve.metrics.shared_counters import WorkerCounters

HANDSHAKE_OUTCOMES = ("ok", "no_tls", "certificate", "failed", "too_large", "too_late", "gone")
"""It is done; what came is no TLS; the client's certificate is none that is taken; any other fault
of the two sides; more bytes or more time than one may take; its client or the server gave it up."""
TLS_CELLS = len(HANDSHAKE_OUTCOMES) + 1


class TlsMetrics:
    """Counted on the event loop's thread.

    Attributes:
        handshakes: by outcome, of this process alone.
        expires_s: Unix time when the certificate ends that this process shows; 0: it shows none.
    """

    def __init__(self, counters: WorkerCounters) -> None:
        self.handshakes: Counter[str] = Counter()
        self.expires_s: Callable[[], float] = float
        self._cells = counters.allocate(TLS_CELLS)
        self._before = self._cells.own[:-1].copy()

    def flush(self) -> None:
        self._cells.own[:-1] = self._before + [self.handshakes[one] for one in HANDSHAKE_OUTCOMES]
        self._cells.own[-1] = self.expires_s()

    def collect(self) -> Iterator[Metric]:
        """Without samples where there is no TLS."""
        handshakes = CounterMetricFamily(
            "embedserve_tls_handshakes",
            "TLS handshakes that ended, by outcome.",
            labels=["outcome"],
        )
        expiry = GaugeMetricFamily(
            "embedserve_tls_certificate_expiry_timestamp_seconds",
            "When the certificate that the server shows ends, in seconds since the epoch; of "
            "several workers the one that ends first.",
            labels=[],
        )
        of_ready = self._cells.of_ready()[:, -1]
        if of_ready.any():
            for outcome, count in zip(HANDSHAKE_OUTCOMES, self._cells.total(), strict=False):
                handshakes.add_metric([outcome], float(count))
            expiry.add_metric([], float(of_ready[of_ready > 0].min()))
        yield handshakes
        yield expiry
