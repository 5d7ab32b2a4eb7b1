"""Tests of joining: every request of a batch gets the result that it gets alone."""

from __future__ import annotations

import re
import tracemalloc

import numpy as np
import pytest
from documents import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from server.fake_engine import Bags, FakeEngine, Weights, make_request, model_info
from server.fake_models import ruled_info, unpooled_info
from server.strategies import bags_of, bags_of_ids, weights_or_none

from embedserve.batching.join import adapt_and_join, adapt_to_model, join
from embedserve.batching.split import in_request_order, split, split_by_examples
from embedserve.errors import InvalidRequestError
from embedserve.lookup_types import LookupRequest, LookupResult

ENGINE = FakeEngine()
MODEL = ENGINE.model
RULED = FakeEngine(ruled_info())
UNPOOLED = FakeEngine(unpooled_info())


def ordered(bags: Bags, weights: Weights | None = None) -> LookupRequest:
    return adapt_to_model(make_request(bags, weights), MODEL)


def batched_results(
    engine: FakeEngine, requests: list[LookupRequest], chunks: int = 1
) -> list[LookupResult]:
    """Returns the batcher's results of ``requests``, looked up in ``chunks``."""
    batch = join(requests, engine.model)
    assert batch is not None
    assert batch.batch_size == sum(request.batch_size for request in requests)
    values = []
    for chunk in split_by_examples(batch, len(engine.model.features), chunks):
        answer = engine.lookup(chunk.ids, chunk.lengths, chunk.weights)
        assert len(answer) or not engine.model.is_pooled
        values.append(in_request_order(answer, chunk, engine.model))
    assert len(values) == min(chunks, batch.batch_size)
    return split(values, batch, requests, engine.model)


def rows(result: LookupResult) -> np.ndarray:
    return np.concatenate([result.values, *result.extra_chunks])


@pytest.mark.parametrize("engine", [ENGINE, RULED, UNPOOLED], ids=lambda e: e.model.name)
@settings(max_examples=50)
@given(data=st.data())
def test_batched_results_equal_results_of_single_requests(
    engine: FakeEngine, data: st.DataObject
) -> None:
    all_bags = data.draw(st.lists(bags_of(engine.model), min_size=1, max_size=6))
    all_weights = [
        data.draw(weights_or_none(bags)) if engine.model.is_pooled else None for bags in all_bags
    ]
    requests = [
        engine.request(bags, weights) for bags, weights in zip(all_bags, all_weights, strict=True)
    ]
    chunks = data.draw(st.integers(1, 5)) if engine.model.is_pooled else 1
    results = batched_results(engine, requests, chunks)
    for bags, weights, result in zip(all_bags, all_weights, results, strict=True):
        assert np.array_equal(rows(result), engine.expected(bags, weights))
        assert result.unknown_ids == engine.expected_unknown(bags)
        if engine.model.is_pooled:
            assert result.lengths is None
        else:
            assert result.lengths is not None
            assert result.lengths.tolist() == engine.expected_lengths(bags)


@settings(max_examples=50)
@given(data=st.data())
def test_joining_does_not_change_the_requests(data: st.DataObject) -> None:
    """Covers requests that are joined again, because another request of their batch was
    rejected."""
    requests = [
        adapt_to_model(make_request(data.draw(bags_of(RULED.model))), RULED.model)
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    for request in requests:
        request.ids.flags.writeable = request.lengths.flags.writeable = False
    first, again = batched_results(RULED, requests), batched_results(RULED, requests)
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one.values, other.values)


@given(bags=bags_of_ids(all_features=True))
def test_the_order_of_features_in_a_request_does_not_matter(bags: Bags) -> None:
    backwards = ordered(dict(reversed(bags.items())))
    forwards = ordered(bags)
    assert backwards.ids.tolist() == forwards.ids.tolist()
    assert backwards.lengths.tolist() == forwards.lengths.tolist()


def test_a_request_in_the_models_order_is_not_copied() -> None:
    request = make_request({"user": [[1]], "movie": [[2]], "tag": [[3]]})
    assert adapt_to_model(request, MODEL) is request


def test_unknown_feature_error_lists_the_known_features() -> None:
    with pytest.raises(InvalidRequestError, match="it has user, movie, tag") as caught:
        ordered({"user": [[1]], "actor": [[1]]})
    assert caught.value.field == "features.actor"


class CountedName(str):
    """A string class that counts its comparisons."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.mark.parametrize("words", [False, True], ids=["integers", "strings"])
def test_comparisons_per_feature_do_not_grow_with_feature_count(words: bool) -> None:
    """Checks that the number per feature does not grow with the number of features."""
    count = 300
    model = model_info("wide", {f"f{at}": (3, 1) for at in range(count)})
    bags: Bags = {CountedName(f"f{at}"): [["1" if words else 1]] for at in reversed(range(count))}
    request = make_request(bags)
    CountedName.comparisons = 0
    adapted = adapt_to_model(request, model)
    assert adapted.ids.tolist() == [1] * count
    assert CountedName.comparisons < 20 * count


@pytest.mark.parametrize(("count", "of"), [(1, "a lone request"), (2, "a batch of several")])
def test_memory_per_bag_stays_within_the_documented_limit(count: int, of: str) -> None:
    """Measures the worst case: unknown ids, and features in another order than the model's."""
    page = " ".join((ROOT / "docs" / "threat-model.md").read_text().split())
    documented = re.search(rf"(\d+) (?:bytes )?for each bag of {of}", page)
    assert documented is not None
    model = UNPOOLED.model
    examples = 50_000
    lengths = np.zeros(examples * len(model.features), np.int32)
    lengths[-1] = 1
    tracemalloc.start()
    try:
        requests = [
            LookupRequest("", model.features[::-1], np.array([99]), lengths.copy(), None, examples)
            for _ in range(count)
        ]
        tracemalloc.reset_peak()
        batch, _, errors = adapt_and_join(requests, model)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (batch is None, errors) == (False, {})
    bags = count * lengths.size
    assert (
        peak_bytes / bags < int(documented[1]) + 1
    )  # with the arrays of the requests and of the batch
