"""Tests of request metrics: requests count for the version that handles them. Unknown names add no
series."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter

import pytest
from server.fake_engine import FakeEngine, model_info
from server.live import IN_THREAD
from server.metrics.metric_samples import families_of, with_version, workers_of
from server.pipelines import make_pipeline, outcomes_of
from server.recording_call import RecordingCall, make_options, submit_request
from server.waiting import until

from embedserve.config import Limits
from embedserve.errors import EmbedServeError
from embedserve.metrics.histogram import PENDING_MAX
from embedserve.metrics.metrics import Metrics
from embedserve.metrics.model_metrics import NAMES_SPARE
from embedserve.metrics.request_metrics import OUTCOMES
from embedserve.metrics.shared_counters import WorkerCounters
from embedserve.model_info import ModelInfo
from embedserve.pipeline import RequestPipeline

USER = b'{"features": {"user": [1]}}'
FILM = b'{"features": {"film": [1]}}'
RequestCounts = dict[tuple[str, str], dict[str, float]]
"""Requests by outcome, for each (alias, version)."""
LIMITS = replace(IN_THREAD, queue_examples_max=1)


def version_of(number: int, alias: str, features: dict[str, tuple[int, int]]) -> ModelInfo:
    info = with_version(model_info("shop", features), number)
    return replace(info, served_name=f"shop@{alias}" * bool(alias))


STABLE = version_of(7, "stable", {"user": (7, 4), "film": (11, 3)})
CANARY = version_of(8, "canary", {"user": (7, 4)})


@pytest.fixture
def stable() -> FakeEngine:
    return FakeEngine(STABLE)


@pytest.fixture
def canary() -> FakeEngine:
    return FakeEngine(CANARY)


@pytest.fixture
def pipeline(
    stable: FakeEngine, canary: FakeEngine, executor: ThreadPoolExecutor, limits: Limits
) -> RequestPipeline:
    return make_pipeline(stable, canary, executor=executor, limits=limits, default_model="shop")


def request_counts(metrics: Metrics) -> RequestCounts:
    """Returns the counts as /metrics has them, without zeros."""
    found: RequestCounts = {}
    for sample in families_of(metrics)["embedserve_model_requests"].samples:
        if sample.value:
            labels = sample.labels
            one = found.setdefault((labels.get("alias", ""), labels["version"]), {})
            one[labels["outcome"]] = sample.value
    return found


def timed_counts(metrics: Metrics) -> dict[str, float]:
    """Returns the number of timed requests, by version."""
    return {
        sample.labels["version"]: sample.value
        for sample in families_of(metrics)["embedserve_model_request_seconds"].samples
        if sample.name.endswith("_count")
    }


async def wait_for_outcomes(*calls: RecordingCall) -> None:
    await until(lambda: all(call.responses for call in calls))


async def test_failing_canary_is_counted_apart_from_stable(
    pipeline: RequestPipeline, canary: FakeEngine
) -> None:
    canary.failure = ZeroDivisionError("secret")
    for model in ("shop", "shop@stable", "shop@canary", "shop@8"):
        await wait_for_outcomes(submit_request(pipeline, USER, model=model))
    assert request_counts(pipeline.metrics) == {
        ("stable", "7"): {"OK": 2},
        ("canary", "8"): {"INTERNAL": 2},
    }
    assert timed_counts(pipeline.metrics) == {"7": 2, "8": 2}
    answered_s, failed_s = pipeline.metrics.models["shop@canary"].version.requests.total_seconds()
    assert answered_s == 0 < failed_s


async def test_rejection_by_a_version_is_counted_for_that_version(
    pipeline: RequestPipeline,
) -> None:
    """Covers unknown features, an id without a row, and a request over a limit."""
    await wait_for_outcomes(
        submit_request(pipeline, FILM), submit_request(pipeline, FILM, model="shop@canary")
    )
    await wait_for_outcomes(
        submit_request(pipeline, b'{"features": {"user": [99]}}', model="shop@canary")
    )
    assert request_counts(pipeline.metrics) == {
        ("stable", "7"): {"OK": 1},
        ("canary", "8"): {"INVALID_ARGUMENT": 2},
    }


async def test_rejection_by_a_full_queue_is_counted_for_its_version(
    pipeline: RequestPipeline, canary: FakeEngine
) -> None:
    canary.hold()
    running = submit_request(pipeline, USER, model="shop@canary")
    await until(lambda: canary.lookups)
    waiting = submit_request(pipeline, USER, model="shop@canary")
    for _ in range(3):  # the first is rejected when queued, others undecoded
        assert (
            submit_request(pipeline, USER, model="shop@canary").error.code == "RESOURCE_EXHAUSTED"
        )
    early = RecordingCall(pipeline, make_options(pipeline, model="shop@canary"))
    pipeline.reject_if_overloaded(early)
    await wait_for_outcomes(submit_request(pipeline, USER))
    canary.release()
    await wait_for_outcomes(running, waiting)
    assert request_counts(pipeline.metrics) == {
        ("stable", "7"): {"OK": 1},
        ("canary", "8"): {"OK": 2, "RESOURCE_EXHAUSTED": 4},
    }


async def test_expired_and_cancelled_requests_are_counted_for_their_version(
    pipeline: RequestPipeline, canary: FakeEngine
) -> None:
    canary.hold()
    running = submit_request(pipeline, USER, model="shop@canary")
    await until(lambda: canary.lookups)
    late = submit_request(pipeline, USER, model="shop@canary", timeout_s=60.0)
    late.deadline_s = perf_counter()
    running.cancel()
    canary.release()
    await wait_for_outcomes(late)
    assert late.error.code == "DEADLINE_EXCEEDED"
    assert request_counts(pipeline.metrics) == {
        ("canary", "8"): {"CANCELLED": 1, "DEADLINE_EXCEEDED": 1},
    }
    queued = submit_request(pipeline, USER, model="shop@canary")
    queued.cancel()
    assert request_counts(pipeline.metrics)["canary", "8"]["CANCELLED"] == 2


async def test_unknown_model_names_add_no_series(pipeline: RequestPipeline) -> None:
    before = len(families_of(pipeline.metrics)["embedserve_model_requests"].samples)
    for i in range(50):
        assert submit_request(pipeline, USER, model=f"film{i}").error.code == "NOT_FOUND"
        assert submit_request(pipeline, USER, model=f"shop@{i + 100}").error.code == "NOT_FOUND"
        body = f'{{"version": "n{i}", "features": {{"user": [1]}}}}'.encode()
        assert submit_request(pipeline, body).error.code == "NOT_FOUND"
    assert submit_request(pipeline, b"{").error.code == "INVALID_ARGUMENT"
    family = families_of(pipeline.metrics)["embedserve_model_requests"]
    assert len(family.samples) == before
    assert request_counts(pipeline.metrics) == {}
    assert outcomes_of(pipeline.metrics.protocols["rest"])["NOT_FOUND"] == 150


def record(metrics: Metrics, name: str, completed: int, failed: int) -> None:
    requests = metrics.models[name].version.requests
    for _ in range(completed):
        requests.count_answered(0.25)
    for _ in range(failed):
        requests.count_outcome("INTERNAL", 0.5)
    metrics.flush()


def test_counts_are_summed_over_workers_including_replaced_workers() -> None:
    slots, workers = workers_of(2, STABLE, CANARY)
    for metrics in workers:
        record(metrics, "shop@canary", 3, 2)
    again = Metrics([STABLE, CANARY], WorkerCounters(slots, 1))
    record(again, "shop@canary", 1, 1)
    for metrics in (workers[0], again):
        assert request_counts(metrics) == {("canary", "8"): {"OK": 7, "INTERNAL": 5}}
        assert timed_counts(metrics) == {"7": 0, "8": 12}
        seconds = metrics.models["shop@canary"].version.requests.total_seconds()
        assert seconds == (7 * 0.25, 5 * 0.5)


def test_number_of_series_does_not_grow_with_switched_versions() -> None:
    _, workers = workers_of(2, STABLE, CANARY)
    sizes = set()
    for number in range(9, 9 + 2 * NAMES_SPARE):
        for metrics in workers:
            record(metrics, "shop@canary", 5, 3)
            late = metrics.models["shop@canary"].version.requests
            metrics.models["shop@canary"].switch(version_of(number, "canary", {"user": (7, 4)}), 1)
            # A batch of the previous version counts these, and ends after the switch.
            late.count_answered(9.0)
            late.count_outcome("INTERNAL", 9.0)
            late.flush()
            metrics.flush()
        for metrics in workers:
            families = {family.name: family for family in metrics.registry().collect()}
            samples = families["embedserve_model_requests"].samples
            assert not any(sample.value for sample in samples)
            sizes.add(len(samples))
    assert timed_counts(workers[0]) == {"7": 0, str(number): 0}
    assert sizes == {2}


def test_rejection_by_a_replaced_version_is_not_counted_for_the_next() -> None:
    _, (metrics,) = workers_of(1, STABLE, CANARY)
    metrics.models["shop@canary"].switch(version_of(9, "canary", {"user": (7, 4)}), 1)
    metrics.count_outcome(CANARY, "INTERNAL", 1.0)
    metrics.count_outcome(None, "INTERNAL", 1.0)
    metrics.remove("shop@canary")
    metrics.count_outcome(CANARY, "INTERNAL", 1.0)
    assert request_counts(metrics) == {}


def test_pending_observations_are_bounded() -> None:
    _, (metrics,) = workers_of(1, STABLE)
    version = metrics.models["shop@stable"].version
    for _ in range(PENDING_MAX - 1):
        version.requests.count_answered(0.5)
        version.wait_seconds.observe(0.5)
        version.batch_ids.observe(1)
    version.flush_if_full()
    assert len(version.requests.pending) == PENDING_MAX - 1
    version.requests.count_answered(0.5)
    version.wait_seconds.observe(0.5)
    version.flush_if_full()
    waiting = version.requests.pending, version.wait_seconds.pending, version.batch_ids.pending
    assert waiting == ([], [], [])
    assert version.requests.total()["OK"] == PENDING_MAX


@pytest.mark.parametrize("outcome", [one for one in OUTCOMES if one != "OK"])
def test_each_outcome_has_its_own_count(outcome: str) -> None:
    _, (metrics,) = workers_of(1, STABLE)
    metrics.count_outcome(STABLE, outcome, 1.0)
    assert request_counts(metrics) == {("stable", "7"): {outcome: 1}}


def test_outcomes_are_the_codes_of_all_errors() -> None:
    """Covers the errors of gRPC's framing, which end a call before its request is read."""
    kinds: list[type[EmbedServeError]] = [EmbedServeError, *EmbedServeError.__subclasses__()]
    assert {kind.code for kind in kinds} | {"OK", "CANCELLED", "UNIMPLEMENTED"} == set(OUTCOMES)
    assert len(OUTCOMES) == len(set(OUTCOMES))
