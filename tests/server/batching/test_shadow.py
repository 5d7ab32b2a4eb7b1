"""Tests of the shadow: what is compared of two versions. No request waits for it."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from server.fake_engine import Bags, FakeEngine, make_request, model_info
from server.fake_models import info_of, ruled_info, unpooled_info
from server.live import IN_THREAD, make_pipeline
from server.pending_requests import submit, submit_to
from server.thread_limit import make_thread_start_fail
from server.waiting import until

from embedserve.batching.batcher import Batcher
from embedserve.batching.join import adapt_to_model, join
from embedserve.batching.shadow import Shadow, ShadowExecutor, compare
from embedserve.batching.split import in_request_order
from embedserve.config import Limits
from embedserve.lookup_types import LookupRequest
from embedserve.metrics.model_metrics import ModelMetrics
from embedserve.metrics.shadow_metrics import Differences
from embedserve.model_info import ModelInfo
from embedserve.pipeline import RequestPipeline
from embedserve_store.format.table_spec import TableSpec

BAGS: list[Bags] = [
    {"user": [[1, 2], []], "movie": [[3], [4, 4]], "tag": [[0], [1]]},
    {"user": [[5]], "movie": [[0]], "tag": [[]]},
]


def version(model: ModelInfo, number: int, name: str = "") -> ModelInfo:
    return replace(model, manifest=replace(model.manifest, version=number), served_name=name)


def lookup_values(requests: list[LookupRequest], engine: FakeEngine) -> np.ndarray:
    batch = join(requests, engine.model)
    assert batch is not None
    values = engine.lookup(batch.ids, batch.lengths, batch.weights)
    return in_request_order(values, batch, engine.model)


def differences(served: FakeEngine, ours: FakeEngine, bags: list[Bags]) -> Differences:
    requests = [adapt_to_model(make_request(one), served.model) for one in bags]
    values = lookup_values(requests, served)
    return compare(requests, values, None, served.model, ours, ours.model)


def test_equal_versions_do_not_differ() -> None:
    found = differences(FakeEngine(seed=3), FakeEngine(seed=3), BAGS)
    vectors, distances, squared, squares, empty = found.sums
    assert (vectors + empty).tolist() == [3] * 3
    assert (vectors > 0).all()
    assert np.allclose(distances, 0, atol=1e-12)
    assert squared.tolist() == [0] * 3
    assert (squares > 0).all()
    assert found.refused == 0


def test_differences_of_two_versions_equal_a_manual_computation() -> None:
    served, ours = FakeEngine(seed=3), FakeEngine(seed=4)
    found = differences(served, ours, BAGS)
    requests = [adapt_to_model(make_request(one), served.model) for one in BAGS]
    one, other = lookup_values(requests, ours), lookup_values(requests, served)
    start = 0
    for i, width in enumerate(served.model.length_per_key):
        a, b = (values[:, start : start + width].astype(np.float64) for values in (one, other))
        start += width
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        both = (a * b).sum(axis=1)
        distances = [
            0.0 if not norm and not both_ else 1 - both_ / max(norm, 1e-30)
            for norm, both_ in zip(norms, both, strict=True)
        ]
        empty = int((~a.any(axis=1) & ~b.any(axis=1)).sum())
        counts = (len(a) - empty, empty)
        expected = [counts[0], sum(distances), ((a - b) ** 2).sum(), (b**2).sum(), counts[1]]
        assert np.allclose(found.sums[:, i], expected)
    assert found.sums[2].all()


def test_features_in_another_order_are_compared_by_their_keys() -> None:
    served = FakeEngine(model_info("shop", {"user": (7, 4), "movie": (11, 3)}), seed=3)
    ours = FakeEngine(model_info("shop", {"movie": (11, 3), "user": (7, 4), "new": (2, 2)}), seed=3)
    bags: list[Bags] = [{"user": [[1, 2]], "movie": [[3]]}, {"user": [[6]]}]
    found = differences(served, ours, bags)
    assert found.keys.tolist() == [0, 1]
    assert found.sums[0].tolist() == [1, 2]
    assert found.refused == 0


def test_feature_missing_in_the_shadow_is_not_compared() -> None:
    """Also covers a request of no other feature: it has empty bags of the others, as in its
    response."""
    served = FakeEngine(model_info("shop", {"user": (7, 4), "movie": (11, 3)}), seed=3)
    ours = FakeEngine(model_info("shop", {"user": (7, 4)}), seed=3)
    found = differences(served, ours, [{"movie": [[3]]}, {"movie": [[4]], "user": [[6, 1]]}])
    assert found.keys.tolist() == [0]
    assert found.sums[[0, 2, 4], 0].tolist() == [1, 0, 1]
    assert found.refused == 0


def test_unrequested_features_count_as_empty() -> None:
    """Covers zeros on both sides, which have no direction and so no cosine."""
    model = model_info("shop", {"user": (7, 4), "movie": (11, 3)})
    served, ours = FakeEngine(model, seed=3), FakeEngine(model, seed=4)
    found = differences(served, ours, [{"user": [[1, 2]]}, {"user": [[6]], "movie": [[]]}])
    assert found.sums[:, 1].tolist() == [0, 0, 0, 0, 2]
    assert found.sums[[0, 4], 0].tolist() == [2, 0]


def test_requests_that_the_shadow_rejects_are_counted_and_the_rest_compared() -> None:
    served = FakeEngine(model_info("shop", {"user": (7, 4)}), seed=3)
    ours = FakeEngine(model_info("shop", {"user": (5, 4)}), seed=3)
    found = differences(served, ours, [{"user": [[1, 2], [6]]}, {"user": [[2]]}, {"user": [[5]]}])
    assert found.refused == 2
    assert found.sums[[0, 2]].tolist() == [[1], [0]]
    nothing = differences(served, ours, [{"user": [[6]]}])
    assert (nothing.refused, nothing.sums[0].tolist()) == (1, [0])


def test_vectors_of_an_unpooled_model_are_compared_one_by_one() -> None:
    model = unpooled_info()
    features = [one for one in model.features if one not in model.string_features]
    bags: list[Bags] = [
        {feature: [[1, 2], [0]] for feature in features},
        {feature: [[], [1]] for feature in features},
    ]
    one, other = FakeEngine(model, seed=3), FakeEngine(model, seed=4)
    same = differences(one, FakeEngine(model, seed=3), bags)
    expected = [4 * (model.features[i] in features) for i in model.feature_per_key]
    assert same.sums[0].tolist() == expected
    assert same.sums[2].tolist() == [0] * len(model.keys)
    assert (differences(one, other, bags).sums[2] > 0).tolist() == [bool(n) for n in expected]


def unpooled_users(rows: int) -> ModelInfo:
    table = TableSpec("t_user", rows, 4, ("user",), "none", "float32")
    return info_of("shop", [table], {})


def test_requests_that_an_unpooled_shadow_rejects_are_counted_and_the_rest_compared() -> None:
    served, ours = (FakeEngine(unpooled_users(rows)) for rows in (7, 5))
    bags: list[Bags] = [{"user": [[1, 2], []]}, {"user": [[6]]}, {"user": [[3], [4, 0]]}]
    found = differences(served, ours, bags)
    assert found.refused == 1
    assert found.sums[[0, 2]].tolist() == [[5], [0]]


def test_zero_vector_differs_from_another_by_a_whole_distance() -> None:
    served, ours = FakeEngine(seed=3), FakeEngine(seed=3)
    ours.tables["t_user"][1] = 0
    for one, other in ((served, ours), (ours, served)):
        found = differences(one, other, [{"user": [[1]]}])
        assert found.sums[[0, 1, 4], 0].tolist() == [1, 1, 0]


def test_versions_without_comparable_keys_are_not_compared() -> None:
    served = FakeEngine(model_info("shop", {"user": (7, 4)}))
    for ours in (
        FakeEngine(model_info("shop", {"person": (7, 4)})),
        FakeEngine(model_info("shop", {"user": (7, 5)})),
        FakeEngine(unpooled_users(7)),
    ):
        with pytest.raises(
            ValueError,
            match=r"no keys in common|key 'user' has 5 columns, and 4 in the version that answers",
        ):
            differences(served, ours, [{"user": [[1]]}])


def test_unknown_ids_are_counted_for_both_versions() -> None:
    model = ruled_info()
    served, ours = FakeEngine(model), FakeEngine(version(model, 8))
    requests = [adapt_to_model(make_request({"day": [[1]], "user": [[7, 0, 8]]}), model)]
    counts = np.zeros((1, len(model.features)), np.int64)
    counts[0, model.features.index("day")] = 3
    values = lookup_values(requests, served)
    found = compare(requests, values, counts, served.model, ours, ours.model)
    assert found.served_unknown_ids.tolist() == counts[0].tolist()
    unknown = dict(zip(model.features, found.unknown_ids.tolist(), strict=True))
    assert unknown == dict.fromkeys(model.features, 0) | {"user": 2}


def test_unknown_ids_of_a_feature_that_the_shadow_lacks_are_not_counted() -> None:
    served = FakeEngine(model_info("shop", {"movie": (11, 3), "user": (7, 4)}))
    ours = FakeEngine(model_info("shop", {"user": (7, 4), "tag": (5, 2)}))
    requests = [adapt_to_model(make_request({"user": [[1]]}), served.model)]
    values = lookup_values(requests, served)
    found = compare(requests, values, np.array([[3, 2]]), served.model, ours, ours.model)
    assert found.served_unknown_ids.tolist() == [2, 0]


@pytest.fixture
def pipeline(executor: ThreadPoolExecutor) -> RequestPipeline:
    """Returns a pipeline where version 7 is served and the canary, 8, returns the same values."""
    model = model_info()
    engines = (
        FakeEngine(version(model, 7), seed=7),
        FakeEngine(version(model, 8, "shop@canary"), seed=7),
    )
    return make_pipeline(*engines, executor=executor)


async def send_request(pipeline: RequestPipeline, examples: int = 1) -> None:
    result = await submit_to(pipeline.models, make_request({"user": [[1]] * examples}))
    assert result.model.version == 7


def batch_count(pipeline: RequestPipeline, outcome: str = "compared") -> float:
    return pipeline.metrics.models["shop@canary"].version.shadow.batches()[outcome]


async def until_batch_count(
    pipeline: RequestPipeline, count: int, outcome: str = "compared"
) -> None:
    await until(lambda: batch_count(pipeline, outcome) == count)


async def test_batches_are_compared_only_while_a_shadow_share_is_set(
    pipeline: RequestPipeline,
) -> None:
    await send_request(pipeline)
    assert batch_count(pipeline) == 0
    pipeline.models.set_shadow("shop@canary", 100.0)
    pipeline.models.set_shadow("shop", 100.0)  # the served version, no shadow
    for count in range(1, 4):
        await send_request(pipeline)
        await until_batch_count(pipeline, count)
    assert pipeline.models.status(pipeline.models.model("shop@canary"))["shadow"] == 100.0
    sums = pipeline.metrics.models["shop@canary"].version.shadow.per_key()
    assert sums[0].tolist() == [3, 0, 0]  # no request has ids of the other features
    assert sums[2].tolist() == [0] * 3
    assert sums[4].tolist() == [0, 3, 3]
    pipeline.models.set_shadow("shop@canary", 0.0)
    await send_request(pipeline)
    assert batch_count(pipeline) == 3


async def test_batch_of_several_threads_is_compared_as_a_whole() -> None:
    engine = FakeEngine()
    metrics = ModelMetrics(engine.model)
    with ThreadPoolExecutor(2) as executor:
        batcher = Batcher(engine, engine.model, IN_THREAD, metrics, executor, threads=2)
        runner = batcher.runner
        runner.shadow = runner.shadow_of(engine.model, 100.0, ShadowExecutor())
        await submit(batcher, engine.request({"user": [[1], [2], [3]]}))
    shadow = metrics.version.shadow
    await until(lambda: shadow.batches()["compared"])
    assert sorted(lookup.batch_size for lookup in engine.lookups) == [1, 2, 3]
    vectors, _, squared, *_ = shadow.per_key()
    assert vectors.tolist() == [3, 0, 0]
    assert squared.tolist() == [0, 0, 0]


def test_only_a_share_of_the_batches_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Mock()
    for drawn, count in ((0.25, 0), (0.24, 1)):
        monkeypatch.setattr("embedserve.batching.shadow.random", Mock(return_value=drawn))
        Shadow(Mock(), Mock(), 25.0, Mock(), executor).offer([], [], None, Mock())
        assert executor.submit.call_count == count


@pytest.mark.parametrize("names", [("beta", "canary"), ("canary", "beta")])
async def test_only_the_first_of_two_shadows_by_name_is_compared(
    executor: ThreadPoolExecutor, names: tuple[str, str]
) -> None:
    """Checks that all workers compare the same version, in whatever order each learned of the
    two."""
    model = model_info()
    engines = [FakeEngine(version(model, 8, f"shop@{name}"), seed=7) for name in names]
    pipeline = make_pipeline(FakeEngine(version(model, 7), seed=7), *engines, executor=executor)
    for name in names:
        pipeline.models.set_shadow(f"shop@{name}", 100.0)
    await send_request(pipeline)
    metrics = pipeline.metrics.models
    await until(lambda: metrics["shop@beta"].version.shadow.batches()["compared"] == 1)
    assert batch_count(pipeline) == 0
    pipeline.models.set_shadow("shop@beta", 0.0)
    await send_request(pipeline)
    await until_batch_count(pipeline, 1)


async def test_busy_shadow_delays_no_request_and_skips_batches(
    executor: ThreadPoolExecutor,
) -> None:
    model = model_info()
    slow = FakeEngine(version(model, 8, "shop@canary"), seed=7)
    pipeline = make_pipeline(FakeEngine(version(model, 7), seed=7), slow, executor=executor)
    slow.hold()
    pipeline.models.set_shadow("shop@canary", 100.0)
    for _ in range(5):
        await send_request(pipeline)
    assert (batch_count(pipeline), batch_count(pipeline, "skipped")) == (0, 4)
    slow.release()
    await until(lambda: batch_count(pipeline) == 1)


async def test_failed_comparisons_are_counted_and_logged_once(
    executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    other = version(model_info("shop", {"person": (7, 4)}), 8, "shop@canary")
    pipeline = make_pipeline(
        FakeEngine(version(model_info(), 7)), FakeEngine(other), executor=executor
    )
    caplog.set_level(logging.WARNING)
    pipeline.models.set_shadow("shop@canary", 100.0)
    for count in (1, 2):
        await send_request(pipeline)
        await until_batch_count(pipeline, count, "failed")
    (logged,) = [one.getMessage() for one in caplog.records if one.name.startswith("embedserve")]
    assert logged.startswith("shop@canary cannot be compared with version 7")


async def test_comparison_without_a_thread_fails_and_the_next_succeeds(
    pipeline: RequestPipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    pipeline.models.set_shadow("shop@canary", 100.0)
    make_thread_start_fail(monkeypatch, "shadow")
    await send_request(pipeline, examples=10)
    assert batch_count(pipeline, "failed") == 1
    for count in (1, 2):
        await send_request(pipeline)
        await until_batch_count(pipeline, count)
    vectors, *_ = pipeline.metrics.models["shop@canary"].version.shadow.per_key()
    assert vectors[0] == 2  # the ten of the failed one are not compared later
    (logged,) = caplog.messages
    assert logged.startswith("shop@canary cannot be compared with version 7")


async def test_shadow_compares_with_the_version_that_is_activated_later(
    pipeline: RequestPipeline, executor: ThreadPoolExecutor
) -> None:
    pipeline.models.set_shadow("shop@canary", 100.0)
    await send_request(pipeline)
    await until_batch_count(pipeline, 1)
    engine = FakeEngine(version(model_info(), 9), seed=7)
    metrics = ModelMetrics(engine.model)
    pipeline.models.activate("shop", Batcher(engine, engine.model, Limits(), metrics, executor))
    assert (await submit_to(pipeline.models, make_request({"user": [[1]]}))).model.version == 9
    shadow = pipeline.metrics.models["shop@canary"].version.shadow
    await until(lambda: shadow.batches()["compared"])
    assert shadow.against == 9


async def test_removed_version_has_no_share_and_is_no_shadow_when_it_returns(
    pipeline: RequestPipeline,
) -> None:
    models = pipeline.models
    canary = models.model("shop@canary")
    models.set_shadow("shop@canary", 100.0)
    models.set_share("shop@canary", 100.0)
    models.activate("shop@canary", models.remove("shop@canary"))
    status = models.status(canary)
    assert (status["share"], status["shadow"]) == (0.0, 0.0)
    await send_request(pipeline)
    assert batch_count(pipeline) == 0


async def test_counts_restart_at_zero_for_another_served_version(
    pipeline: RequestPipeline, executor: ThreadPoolExecutor
) -> None:
    pipeline.models.set_shadow("shop@canary", 100.0)
    await send_request(pipeline)
    await until(lambda: batch_count(pipeline) == 1)
    shadow = pipeline.metrics.models["shop@canary"].version.shadow
    assert shadow.against == 7
    shadow.begin(7)
    assert batch_count(pipeline) == 1
    shadow.begin(9)
    assert (shadow.against, batch_count(pipeline)) == (9, 0)
