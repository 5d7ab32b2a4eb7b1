"""Tests of unknown ids: rejected, left out of their bags or looked up as the default row;
counted."""

from __future__ import annotations

import numpy as np
from server.fake_engine import Bags, make_request
from server.fake_models import ruled_info, unpooled_info

from embedserve.batching.join import adapt_to_model, join
from embedserve.lookup_types import Batch
from embedserve.model_info import ModelInfo

RULED = ruled_info()
UNPOOLED = unpooled_info()


def joined(model: ModelInfo, *all_bags: Bags) -> Batch | None:
    requests = [adapt_to_model(make_request(bags), model) for bags in all_bags]
    return join(requests, model)


def test_ids_become_rows_by_the_rule_of_each_feature() -> None:
    batch = joined(RULED, {"user": [[10**15, -1]], "tag": [["映画"]], "day": [[-1, 4]]})
    assert batch is not None
    assert batch.ids.tolist() == [4, 0, 2, 5, 2]
    assert batch.lengths.tolist() == [2, 0, 1, 2, 0]
    assert batch.unknown_counts is None


def test_skipped_id_and_its_weight_are_removed_from_the_bag() -> None:
    """Checks that a mean divides by the number of remaining ids."""
    request = make_request({"tag": [["war", "drama", ""], ["war"]]}, {"tag": [[1, 2, 3], [4]]})
    batch = join([adapt_to_model(request, RULED)], RULED)
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
