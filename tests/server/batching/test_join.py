"""Tests of joining requests and splitting results: every request of a batch gets the result that it
gets alone. Unknown ids are rejected, left out or looked up as the default row; counted."""

import re
import tracemalloc

import numpy as np
import pytest
from documents import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from server.fake_engine import Bags, FakeEngine, make_request, model_info
from server.fake_models import ruled_info, unpooled_info
from server.strategies import bags_of, bags_of_ids, weights_or_none

from embedserve.batching.join import adapt_and_join, adapt_to_model, join
from embedserve.batching.permutations import bags_to_ids, feature_major_order, request_major_order
from embedserve.batching.split import in_request_order, split, split_by_examples
from embedserve.errors import InvalidRequestError
from embedserve.lookup_types import Batch, LookupRequest, LookupResult

ENGINE = FakeEngine()
MODEL = ENGINE.model
RULED = FakeEngine(ruled_info())
UNPOOLED = FakeEngine(unpooled_info())


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


def joined(engine: FakeEngine, *all_bags: Bags) -> Batch | None:
    return join([engine.request(bags) for bags in all_bags], engine.model)


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
        RULED.request(data.draw(bags_of(RULED.model))) for _ in range(data.draw(st.integers(1, 3)))
    ]
    for request in requests:
        request.ids.flags.writeable = request.lengths.flags.writeable = False
    first, again = batched_results(RULED, requests), batched_results(RULED, requests)
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one.values, other.values)


@given(bags=bags_of_ids(all_features=True))
def test_the_order_of_features_in_a_request_does_not_matter(bags: Bags) -> None:
    backwards = ENGINE.request(dict(reversed(bags.items())))
    forwards = ENGINE.request(bags)
    assert backwards.ids.tolist() == forwards.ids.tolist()
    assert backwards.lengths.tolist() == forwards.lengths.tolist()


def test_a_request_in_the_models_order_is_not_copied() -> None:
    request = make_request({"user": [[1]], "movie": [[2]], "tag": [[3]]})
    assert adapt_to_model(request, MODEL) is request


def test_unknown_feature_error_lists_the_known_features() -> None:
    with pytest.raises(InvalidRequestError, match="it has user, movie, tag") as caught:
        ENGINE.request({"user": [[1]], "actor": [[1]]})
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


BAGS: Bags = {"item": [[1, 2], [3]], "last": [[4], []]}


def test_pooled_values_are_slices_of_the_batch() -> None:
    requests = [ENGINE.request({"user": [[i]]}) for i in range(3)]
    batch = join(requests, MODEL)
    assert batch is not None
    values = ENGINE.lookup(batch.ids, batch.lengths)
    assert in_request_order(values, batch, MODEL) is values
    for i, result in enumerate(split([values], batch, requests, MODEL)):
        assert np.shares_memory(result.values, values[i])
        assert (result.unknown_ids, result.lengths) == (None, None)


def test_rows_of_a_lone_request_are_not_reordered() -> None:
    batch = joined(UNPOOLED, BAGS)
    assert batch is not None
    values = UNPOOLED.lookup(batch.ids, batch.lengths)
    assert in_request_order(values, batch, UNPOOLED.model) is values


def test_rows_are_grouped_by_key_for_each_request() -> None:
    all_bags: tuple[Bags, ...] = (BAGS, {"last": [[5, 6]]}, {"item": [[]]})
    results = batched_results(UNPOOLED, [UNPOOLED.request(bags) for bags in all_bags])
    item, again = UNPOOLED.tables["t_item"], UNPOOLED.tables["t_again"]
    assert np.array_equal(results[0].values, [*item[[1, 2, 3, 4]], *again[[1, 2, 3]]])
    assert np.array_equal(results[1].values, item[[5, 6]])
    assert results[2].values.shape == (0, 4)


def test_ids_become_rows_by_the_rule_of_each_feature() -> None:
    batch = joined(RULED, {"user": [[10**15, -1]], "tag": [["映画"]], "day": [[-1, 4]]})
    assert batch is not None
    assert batch.ids.tolist() == [4, 0, 2, 5, 2]
    assert batch.lengths.tolist() == [2, 0, 1, 2, 0]
    assert batch.unknown_counts is None


def test_skipped_id_and_its_weight_are_removed_from_the_bag() -> None:
    """Checks that a mean divides by the number of remaining ids."""
    request = make_request({"tag": [["war", "drama", ""], ["war"]]}, {"tag": [[1, 2, 3], [4]]})
    batch = join([adapt_to_model(request, RULED.model)], RULED.model)
    assert batch is not None
    assert batch.ids.tolist() == [0, 3]
    assert batch.lengths.tolist() == [0, 0, 0, 0, 2, 0, 0, 0, 0, 0]
    assert batch.lengths.dtype == np.int32
    assert batch.weights is not None
    assert batch.weights.tolist() == [2, 3]
    assert request.lengths.tolist() == [3, 1]


def test_unknown_id_becomes_the_default_row() -> None:
    batch = joined(RULED, {"movie": [[11, 2, -1]]})
    assert batch is not None
    assert batch.ids.tolist() == [3, 2, 3]
    assert batch.lengths.tolist() == [0, 3, 0, 0, 0]


def test_unknown_ids_are_counted_for_each_request_and_feature() -> None:
    batch = joined(
        RULED,
        {"user": [[5, 6], [7]], "movie": [[99], [0]]},
        {"user": [[0]]},
        {"tag": [["x"], ["y"]], "user": [[], [8]]},
    )
    assert batch is not None
    assert batch.unknown_counts is not None
    assert batch.unknown_counts.tolist() == [[3, 1, 0, 0, 0], [0] * 5, [1, 0, 2, 0, 0]]


def test_batch_with_a_forbidden_unknown_id_is_not_joined() -> None:
    assert joined(RULED, {"shelf": [[100]]}, {"shelf": [[101]]}) is None
    assert joined(RULED, {"shelf": [[100]]}, {"shelf": [[200]]}) is not None


def test_skipped_id_keeps_its_place_in_an_unpooled_model() -> None:
    batch = joined(UNPOOLED, {"item": [[9, 1]]}, {"last": [[2, -5]]})
    assert batch is not None
    assert batch.lengths.tolist() == [2, 0, 0, 2, 0, 0]
    assert batch.skipped is not None
    assert batch.skipped.tolist() == [0, 3]
    assert batch.ids[[1, 2]].tolist() == [1, 2]


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(sizes=SIZES, features=st.integers(1, 4))
def test_feature_major_order_equals_a_simple_loop(sizes: list[int], features: int) -> None:
    bags, start = [], 0
    for size in sizes:
        bags.append(np.arange(start, start + features * size).reshape(features, size))
        start += features * size
    expected = np.concatenate(bags, axis=1).reshape(-1)
    assert feature_major_order(np.array(sizes), features).tolist() == expected.tolist()


@given(data=st.data())
def test_bags_to_ids_moves_whole_bags(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    order = data.draw(st.permutations(range(len(lengths))))
    bags = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    expected = np.concatenate([bags[i] for i in order])
    positions = bags_to_ids(np.array(lengths, np.int32), np.array(order))
    assert positions.tolist() == expected.tolist()


@given(sizes=SIZES, features=st.integers(1, 4))
def test_request_major_order_inverts_feature_major_order(sizes: list[int], features: int) -> None:
    there = feature_major_order(np.array(sizes), features)
    back = request_major_order(np.array(sizes), features)
    assert there[back].tolist() == list(range(features * sum(sizes)))
