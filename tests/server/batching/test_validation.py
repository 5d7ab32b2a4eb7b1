"""Tests of validation: each invalid request gets an error that names the field, before it is
queued."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.fake_engine import FEATURES, Bags, FakeEngine, Weights, make_request
from server.fake_models import info_of, ruled_info, unpooled_info
from server.strategies import bags_of, bags_of_ids

from embedserve.batching.join import adapt_to_model, join
from embedserve.batching.validation import find_invalid
from embedserve.errors import InvalidRequestError
from embedserve.lookup_types import LookupRequest
from embedserve.model_info import ModelInfo
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.table_spec import TableSpec

ENGINE = FakeEngine()
MODEL = ENGINE.model
RULED = ruled_info()
UNPOOLED = unpooled_info()


def string_model() -> ModelInfo:
    """Returns a model that rejects unknown titles."""
    rule = IdRule("map", id_type="string")
    table = TableSpec("t_title", 2, 4, ("title",), "sum", "float32", ids=rule)
    return info_of("films", [table], {"t_title": ("Heat", "Alien")})


def ordered(bags: Bags, weights: Weights | None = None, model: ModelInfo = MODEL) -> LookupRequest:
    return adapt_to_model(make_request(bags, weights), model)


def make_invalid(request: LookupRequest, how: str, place: int) -> LookupRequest:
    """Returns ``request`` with one id, length or weight made invalid."""
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
        return make_invalid(request, "length", place)
    elif how in ("nan", "inf"):
        weights[place % ids.size] = float(how)
    else:
        ids[place % ids.size] = {"negative": -1, "large": 11, "huge": 2**63 - 1}[how]
    return LookupRequest(request.model, request.features, ids, lengths, weights, request.batch_size)


DEFECTS = ("length", "negative length", "nan", "inf", "negative", "large", "huge")


@given(data=st.data())
def test_only_invalid_requests_are_found_and_others_keep_their_results(
    data: st.DataObject,
) -> None:
    all_bags = data.draw(st.lists(bags_of_ids(), min_size=1, max_size=5))
    invalid = data.draw(st.sets(st.integers(0, len(all_bags) - 1)))
    requests = [
        make_invalid(
            ordered(bags), data.draw(st.sampled_from(DEFECTS)), data.draw(st.integers(0, 99))
        )
        if i in invalid
        else ordered(bags)
        for i, bags in enumerate(all_bags)
    ]
    errors = find_invalid(requests, MODEL)
    assert errors.keys() == invalid
    assert all(error.field for error in errors.values())
    assert (join(requests, MODEL) is None) == bool(invalid)
    valid = [i for i in range(len(requests)) if i not in invalid]
    if valid:
        batch = join([requests[i] for i in valid], MODEL)
        assert batch is not None
        values = ENGINE.lookup(batch.ids, batch.lengths, batch.weights)
        alone = [ENGINE.expected(all_bags[i]) for i in valid]
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
def test_out_of_range_id_error_names_position_and_value(
    bags: Bags, field: str, message: str
) -> None:
    error = find_invalid([ordered(bags)], MODEL)[0]
    assert error.field == field
    assert error.message == f"{field} is {message}"
    assert join([ordered(bags)], MODEL) is None


def test_last_row_of_every_table_is_valid() -> None:
    bags = {feature: [[rows - 1, 0]] for feature, (rows, _) in FEATURES.items()}
    assert find_invalid([ordered(bags)], MODEL) == {}


def test_nan_weight_error_names_its_position() -> None:
    weights = {"user": [[1.0], [2.0, float("nan")]], "tag": [[], [1.0]]}
    request = ordered({"user": [[1], [2, 3]], "tag": [[], [4]]}, weights)
    valid = ordered({"user": [[1]]}, {"user": [[0.5]]})
    ((position, error),) = find_invalid([valid, request], MODEL).items()
    assert (position, error.field) == (1, "weights.user[1][1]")
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
def test_lengths_that_do_not_match_the_ids_are_rejected(
    lengths: list[int], message: str, features: tuple[str, ...]
) -> None:
    ids = np.zeros(6, np.int64)
    request = LookupRequest("", features, ids, np.array(lengths, np.int32), None, 2)
    with pytest.raises(InvalidRequestError) as caught:
        raise find_invalid([adapt_to_model(request, MODEL)], MODEL)[0]
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("bags", "field", "message"),
    [
        ({"shelf": [[], [100, 12]]}, "features.shelf[1][1]", "12: not one of the 3 ids of 'shelf'"),
        (
            {"shelf": [[-1, 300, 7]]},
            "features.shelf[0][0]",
            "-1: not one of the 3 ids of 'shelf' (1 more are wrong)",
        ),
    ],
)
def test_id_outside_the_vocabulary_error_names_position_and_value(
    bags: Bags, field: str, message: str
) -> None:
    request = ordered(bags, model=RULED)
    error = find_invalid([request], RULED)[0]
    assert error.field == field
    assert error.message == f"{field} is {message}"
    assert join([request], RULED) is None


def test_unknown_id_error_of_a_changing_vocabulary_names_the_delta() -> None:
    deltas: Any = SimpleNamespace(live=SimpleNamespace(seq=5))
    model = replace(RULED, deltas=deltas)
    error = find_invalid([ordered({"shelf": [[12]]}, model=model)], model)[0]
    assert error.message == (
        "features.shelf[0][0] is 12: not one of the ids of 'shelf', as of delta 5"
    )


def test_unknown_ids_are_valid_if_the_rule_allows_them() -> None:
    bags: Bags = {
        "user": [[5, 2**62]],
        "movie": [[-1, 11, 2**63 - 1]],
        "tag": [["no such tag"]],
        "day": [[-(2**63), 2**63 - 1]],
    }
    assert find_invalid([ordered(bags, model=RULED)], RULED) == {}


def test_unknown_string_id_is_quoted_and_shortened_in_the_error() -> None:
    strict = string_model()
    for string, shown in (("wär", "'wär'"), ("a'\n", '"a\'\\n"'), ("x" * 99, "'" + "x" * 59 + "…")):
        error = find_invalid([ordered({"title": [["Heat", string]]}, model=strict)], strict)[0]
        field = "features.title[0][1]"
        assert error.field == field
        assert error.message == f"{field} is {shown}: not one of the 2 ids of 'title'"


@pytest.mark.parametrize(
    ("bags", "model", "field", "message"),
    [
        (
            {"movie": [[1], []], "user": [[], ["abc"]]},
            RULED,
            "features.user[1][0]",
            "is 'abc': ids of 'user' are integers of 64 bits",
        ),
        (
            {"user": [[0], []], "tag": [[], [7]]},
            RULED,
            "features.tag[1][0]",
            "is 7: ids of 'tag' are strings",
        ),
        *[
            (
                {"user": [["7", "8"], [], ["9", wrong]]},
                MODEL,
                "features.user[2][1]",
                f"is {wrong!r}: ids of 'user' are integers of 64 bits",
            )
            for wrong in ("+1", " 1", "1.0", "\uff11", "", "007", str(2**63), str(-(2**63) - 1))
        ],
        ({"tag": [[0]]}, UNPOOLED, "features.tag[0][0]", "is 0: ids of 'tag' are strings"),
    ],
)
def test_ids_of_the_wrong_type_are_rejected(
    bags: Bags, model: ModelInfo, field: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ordered(bags, model=model)
    assert caught.value.field == field
    assert caught.value.message == f"{field} {message}"


@given(data=st.data(), model=st.sampled_from([MODEL, RULED, UNPOOLED]))
def test_integer_ids_may_be_sent_as_strings(data: st.DataObject, model: ModelInfo) -> None:
    bags = data.draw(bags_of(model))
    as_strings = {
        feature: [list(map(str, bag)) for bag in feature_bags]
        if data.draw(st.booleans())
        else feature_bags
        for feature, feature_bags in bags.items()
    }
    sent = make_request(as_strings)
    sent_ids = sent.ids.copy()
    adapted, plain = adapt_to_model(sent, model), ordered(bags, model=model)
    assert adapted.features == plain.features
    assert np.array_equal(adapted.ids, plain.ids)
    assert np.array_equal(adapted.lengths, plain.lengths)
    assert adapted.string_features == plain.string_features
    assert (adapted.strings is None) == (not adapted.string_features)
    assert np.array_equal(sent.ids, sent_ids)  # another version may get the same request


def test_integer_id_sent_as_a_string_is_validated() -> None:
    error = find_invalid([ordered({"user": [["1", "7"]]})], MODEL)[0]
    assert error.message == "features.user[0][1] is 7: ids of 'user' are row numbers from 0 to 6"


def test_empty_bags_are_valid_for_either_id_type() -> None:
    request = ordered({"user": [[]], "movie": [[1]], "tag": [[]]}, model=RULED)
    assert find_invalid([request], RULED) == {}


def test_unknown_feature_is_reported_before_wrong_id_types() -> None:
    with pytest.raises(InvalidRequestError, match="no such feature"):
        ordered({"actor": [["x"]]}, model=RULED)


def test_wrong_lengths_are_reported_before_wrong_id_types() -> None:
    request = make_request({"tag": [[0]], "user": [[1]]})
    request.lengths = np.array([9, -3], np.int32)
    with pytest.raises(InvalidRequestError, match=r"^lengths\[1\] is -3"):
        adapt_to_model(request, RULED)


def test_weights_are_rejected_for_unpooled_models() -> None:
    request = make_request({"item": [[1]]}, {"item": [[0.5]]})
    with pytest.raises(InvalidRequestError, match=r"^weights: model 'sequence'") as caught:
        adapt_to_model(request, UNPOOLED)
    assert caught.value.field == "weights"
