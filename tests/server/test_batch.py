"""Joining is invisible: every request of a batch is answered as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.fake_engine import FEATURES, Bags, FakeEngine, make_request
from server.strategies import bags_of_ids, weights_or_none

from embedserve.batch import bags_to_ids, feature_major_order, find_invalid, join, to_model_order
from embedserve.errors import InvalidRequestError
from embedserve.types import LookupRequest

ENGINE = FakeEngine()
MODEL = ENGINE.model


def ordered(bags: Bags, weights: dict[str, list[list[float]]] | None = None) -> LookupRequest:
    return to_model_order(make_request(bags, weights), MODEL)


@given(data=st.data())
def test_split_of_join_is_each_request_alone(data: st.DataObject) -> None:
    all_bags = data.draw(st.lists(bags_of_ids(), min_size=1, max_size=6))
    all_weights = [data.draw(weights_or_none(bags)) for bags in all_bags]
    requests = [ordered(b, w) for b, w in zip(all_bags, all_weights, strict=True)]
    batch = join(requests, MODEL)
    assert batch is not None
    values = ENGINE.lookup(batch.ids, batch.lengths, batch.weights)
    assert len(values) == batch.batch_size
    start = 0
    for bags, weights, request in zip(all_bags, all_weights, requests, strict=True):
        mine = values[start : start + request.batch_size]
        assert np.array_equal(mine, ENGINE.expected(bags, weights))
        start += request.batch_size
    assert start == batch.batch_size


@given(bags=bags_of_ids(all_features=True))
def test_the_order_of_features_in_a_request_does_not_matter(bags: Bags) -> None:
    backwards = ordered(dict(reversed(bags.items())))
    forwards = ordered(bags)
    assert backwards.ids.tolist() == forwards.ids.tolist()
    assert backwards.lengths.tolist() == forwards.lengths.tolist()


def test_a_request_in_the_models_order_is_not_copied() -> None:
    request = make_request({"user": [[1]], "movie": [[2]], "tag": [[3]]})
    assert to_model_order(request, MODEL) is request


def test_an_unknown_feature_is_named_with_those_that_there_are() -> None:
    with pytest.raises(InvalidRequestError, match="it has user, movie, tag") as caught:
        ordered({"user": [[1]], "actor": [[1]]})
    assert caught.value.field == "features.actor"


def spoil(request: LookupRequest, how: str, place: int) -> LookupRequest:
    """``request`` with one id, length or weight made wrong."""
    ids, lengths = request.ids.copy(), request.lengths.copy()
    weights = np.ones(ids.size, np.float32) if request.weights is None else request.weights.copy()
    if how == "length":
        lengths[place % lengths.size] += 1
    elif how == "negative length":
        # The sum stays as it was.
        place %= lengths.size
        lengths[place - 1] += lengths[place] + 1
        lengths[place] = -1
    elif not ids.size:
        return spoil(request, "length", place)
    elif how in ("nan", "inf"):
        weights[place % ids.size] = float(how)
    else:
        ids[place % ids.size] = {"negative": -1, "large": 11, "huge": 2**63 - 1}[how]
    return LookupRequest(request.model, request.features, ids, lengths, weights, request.batch_size)


HOW = ("length", "negative length", "nan", "inf", "negative", "large", "huge")


@given(data=st.data())
def test_exactly_the_bad_requests_are_found_and_no_neighbour_is_harmed(
    data: st.DataObject,
) -> None:
    all_bags = data.draw(st.lists(bags_of_ids(), min_size=1, max_size=5))
    bad = data.draw(st.sets(st.integers(0, len(all_bags) - 1)))
    requests = [
        spoil(ordered(bags), data.draw(st.sampled_from(HOW)), data.draw(st.integers(0, 99)))
        if i in bad
        else ordered(bags)
        for i, bags in enumerate(all_bags)
    ]
    errors = find_invalid(requests, MODEL)
    assert errors.keys() == bad
    assert all(error.field for error in errors.values())
    assert (join(requests, MODEL) is None) == bool(bad)
    good = [i for i in range(len(requests)) if i not in bad]
    if good:
        batch = join([requests[i] for i in good], MODEL)
        assert batch is not None
        values = ENGINE.lookup(batch.ids, batch.lengths, batch.weights)
        alone = [ENGINE.expected(all_bags[i]) for i in good]
        assert np.array_equal(values, np.concatenate(alone))


@pytest.mark.parametrize(
    ("bags", "field", "message"),
    [
        (
            {"user": [[0], [1, 7]]},
            "features.user[1][1]",
            "7: ids of 'user' are row numbers from 0 to 6",
        ),
        ({"tag": [[-1]]}, "features.tag[0][0]", "-1: ids of 'tag' are row numbers from 0 to 4"),
        (
            {"movie": [[], [2**63 - 1]]},
            "features.movie[1][0]",
            "9223372036854775807: ids of 'movie' are row numbers from 0 to 10",
        ),
        (
            {"user": [[9, 1, 8]]},
            "features.user[0][0]",
            "9: ids of 'user' are row numbers from 0 to 6 (1 more are wrong)",
        ),
    ],
)
def test_an_id_past_its_table_is_named_with_place_and_value(
    bags: Bags, field: str, message: str
) -> None:
    error = find_invalid([ordered(bags)], MODEL)[0]
    assert error.field == field
    assert error.message == f"{field} is {message}"
    assert join([ordered(bags)], MODEL) is None


def test_the_last_row_of_every_table_is_a_row() -> None:
    bags = {feature: [[rows - 1, 0]] for feature, (rows, _) in FEATURES.items()}
    assert find_invalid([ordered(bags)], MODEL) == {}


def test_a_weight_that_is_not_a_number_is_named_with_its_place() -> None:
    weights = {"user": [[1.0], [2.0, float("nan")]], "tag": [[], [1.0]]}
    request = ordered({"user": [[1], [2, 3]], "tag": [[], [4]]}, weights)
    error = find_invalid([request], MODEL)[0]
    assert error.field == "weights.user[1][1]"
    assert error.message == "weights.user[1][1] is nan: weights are finite numbers"


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 1, 1, 1, 1, 2], "lengths add up to 7, but there are 6 ids"),
        ([1, 1, 1, 4, -1, 0], "lengths[4] is -1: a bag cannot hold fewer than 0 ids"),
        ([2**31 - 1] * 6, "lengths add up to 12884901882, but there are 6 ids"),
    ],
)
@pytest.mark.parametrize("features", [("user", "movie", "tag"), ("tag", "movie", "user")])
def test_lengths_that_are_no_partition_of_the_ids_are_said_so(
    lengths: list[int], message: str, features: tuple[str, ...]
) -> None:
    ids = np.zeros(6, np.int64)
    request = LookupRequest("", features, ids, np.array(lengths, np.int32), None, 2)
    with pytest.raises(InvalidRequestError) as caught:
        raise find_invalid([to_model_order(request, MODEL)], MODEL)[0]
    assert caught.value.message == message


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    features=st.integers(1, 4),
)
def test_feature_major_order_is_the_obvious_loop(sizes: list[int], features: int) -> None:
    bags, start = [], 0
    for size in sizes:
        bags.append(np.arange(start, start + features * size).reshape(features, size))
        start += features * size
    obvious = np.concatenate(bags, axis=1).reshape(-1)
    assert feature_major_order(np.array(sizes), features).tolist() == obvious.tolist()


@given(data=st.data())
def test_bags_to_ids_moves_whole_bags(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    order = data.draw(st.permutations(range(len(lengths))))
    bags = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    obvious = np.concatenate([bags[i] for i in order])
    positions = bags_to_ids(np.array(lengths, np.int32), np.array(order))
    assert positions.tolist() == obvious.tolist()
