"""Tests of delta metrics: every worker exports the values of the one applier."""

from dataclasses import replace

import pytest
from server.fake_deltas import shared_state
from server.fake_models import model_info
from server.metrics.metric_samples import workers_of

from embedserve.deltas.status import Applied, DeltaState, DeltaStatus, Durations
from embedserve.metrics.metrics import Metrics
from embedserve_store.format.delta_manifest import LinePosition

APPLIED = Applied(5, 1e9, "ab" * 32)


def values(
    state: str = "following", waiting_since: float = 0.0, looked_at: float = 0.0
) -> dict[str, float]:
    """Returns the samples of deltas by name, as one of two workers exports them."""
    status = DeltaStatus(LinePosition(7, 0, "0" * 64))
    status.write(
        DeltaState(
            APPLIED,
            APPLIED,
            state,
            wanted_seq=6,
            waiting_since=waiting_since,
            looked_at=looked_at,
            rows=10,
            nbytes=11,
            refused=12,
            undos=9,
            rows_changed=13,
            ids_changed=15,
            memory_bytes=14,
            apply_seconds=Durations().plus(0.02),
            freshness_seconds=Durations().plus(2.0).plus(3.0),
        )
    )
    model = replace(model_info(), deltas=shared_state(status))
    _, (_, scraped) = workers_of(2, model)
    registry = scraped.registry()
    return {
        sample.name.removeprefix("embedserve_delta_"): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith("embedserve_delta_") and "le" not in sample.labels
    }


def test_delta_metrics_are_not_summed_over_workers() -> None:
    assert values() == {
        "seq": 5,
        "wanted_seq": 6,
        "lag_seconds": 0,
        "look_age_seconds": 0,
        "stalled": 0,
        "full": 0,
        "held": 0,
        "rows_changed": 13,
        "ids_changed": 15,
        "memory_bytes": 14,
        "rows_total": 10,
        "bytes_total": 11,
        "undo_total": 9,
        "refused_total": 12,
        "apply_seconds_count": 1,
        "apply_seconds_sum": 0.02,
        "freshness_seconds_count": 2,
        "freshness_seconds_sum": 5.0,
    }


@pytest.mark.parametrize("state", ["stalled", "full", "held"])
def test_blocked_line_exports_its_state_and_lag(state: str) -> None:
    exported = values(state, waiting_since=1e9)
    assert [one for one in ("stalled", "full", "held") if exported[one]] == [state]
    assert exported["lag_seconds"] > 1e8


def test_age_of_the_last_poll_grows_without_the_applier() -> None:
    assert values(looked_at=1e9)["look_age_seconds"] > 1e8


def test_model_without_deltas_has_no_delta_metrics() -> None:
    names = {family.name for family in Metrics([model_info()]).collect() if family.samples}
    assert not [name for name in names if "delta" in name]
