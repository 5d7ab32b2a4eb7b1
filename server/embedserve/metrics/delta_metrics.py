"""Samples of the deltas that a model follows, from the memory that the applier writes.

There is one applier for all workers, so these values are not summed over workers. On a GPU the last
delta is that of the worker that is scraped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from embedserve.deltas.status import FULL, HELD, STALLED, SharedDeltaState
from embedserve.metrics.families import Sample
from embedserve.metrics.histogram import HistogramSamples


def delta_samples(labels: Sequence[str], shared: SharedDeltaState) -> Iterator[Sample]:
    """Yields the samples of one followed model.

    Args:
        labels: labels of the served name.
    """
    now = shared.read()
    values: dict[str, float | HistogramSamples] = {
        "seq": now.applied.seq,
        "wanted_seq": max(now.wanted_seq, now.applied.seq),
        "lag_seconds": now.lag_s(),
        "look_age_seconds": now.look_age_s(),
        "stalled": now.state == STALLED,
        "full": now.state == FULL,
        "held": now.state == HELD,
        "rows_changed": now.rows_changed,
        "ids_changed": now.ids_changed,
        "memory_bytes": now.memory_bytes,
        "rows": now.rows,
        "bytes": now.nbytes,
        "undo": now.undos,
        "refused": now.refused,
        "apply_seconds": now.apply_seconds.samples(),
        "freshness_seconds": now.freshness_seconds.samples(),
    }
    if shared.notify is not None:
        values["notify_connected"] = shared.notify.is_set
    for name, value in values.items():
        yield f"embedserve_delta_{name}", labels, value
