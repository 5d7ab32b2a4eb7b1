"""Tests of TLS metrics: the handshakes of all workers, and the certificate that expires first."""

from functools import partial

from embedserve.metrics.shared_counters import SharedCounters, WorkerCounters
from embedserve.metrics.tls import HANDSHAKE_OUTCOMES, TlsMetrics


def exported(one: TlsMetrics) -> dict[str, object]:
    return {labels[0] if labels else "expiry": value for _, labels, value in one.samples()}


def test_handshakes_are_summed_and_the_earliest_expiry_is_exported() -> None:
    slots = SharedCounters(2)
    workers = [TlsMetrics(WorkerCounters(slots, number)) for number in range(2)]
    for number, worker in enumerate(workers):
        slots.set_ready(number, True)
        worker.handshakes["ok"] += 3
        worker.expires_s = partial(float, 2e9 + number)
        worker.flush()
    workers[1].handshakes["too_late"] += 1
    workers[1].flush()
    counts = dict.fromkeys(HANDSHAKE_OUTCOMES, 0.0) | {"ok": 6.0, "too_late": 1.0}
    assert exported(workers[0]) == counts | {"expiry": 2e9}
    slots.set_ready(0, False)
    assert exported(workers[1])["expiry"] == 2e9 + 1
    replaced = TlsMetrics(WorkerCounters(slots, 0))
    replaced.handshakes["ok"] += 1
    replaced.flush()
    assert exported(workers[1])["ok"] == 7.0


def test_server_without_tls_exports_no_tls_metrics() -> None:
    slots = SharedCounters(1)
    slots.set_ready(0, True)
    plain = TlsMetrics(WorkerCounters(slots, 0))
    plain.flush()
    assert exported(plain) == {}
