"""Tests of splitting: pooled values are not copied, and rows are gathered only for joined
requests."""

from __future__ import annotations

import numpy as np
from server.fake_engine import Bags, FakeEngine, make_request
from server.fake_models import unpooled_info

from embedserve.batching.join import adapt_to_model, join
from embedserve.batching.split import in_request_order, split

POOLED = FakeEngine()
UNPOOLED = FakeEngine(unpooled_info())
BAGS: Bags = {"item": [[1, 2], [3]], "last": [[4], []]}


def test_pooled_values_are_slices_of_the_batch() -> None:
    requests = [adapt_to_model(make_request({"user": [[i]]}), POOLED.model) for i in range(3)]
    batch = join(requests, POOLED.model)
    assert batch is not None
    values = POOLED.lookup(batch.ids, batch.lengths)
    assert in_request_order(values, batch, POOLED.model) is values
    for i, result in enumerate(split([values], batch, requests, POOLED.model)):
        assert np.shares_memory(result.values, values[i])
        assert (result.unknown_ids, result.lengths) == (None, None)


def test_rows_of_a_lone_request_are_not_reordered() -> None:
    request = adapt_to_model(make_request(BAGS), UNPOOLED.model)
    batch = join([request], UNPOOLED.model)
    assert batch is not None
    values = UNPOOLED.lookup(batch.ids, batch.lengths)
    assert in_request_order(values, batch, UNPOOLED.model) is values


def test_rows_are_grouped_by_key_for_each_request() -> None:
    all_bags: tuple[Bags, ...] = (BAGS, {"last": [[5, 6]]}, {"item": [[]]})
    requests = [adapt_to_model(make_request(bags), UNPOOLED.model) for bags in all_bags]
    batch = join(requests, UNPOOLED.model)
    assert batch is not None
    values = UNPOOLED.lookup(batch.ids, batch.lengths)
    ordered = in_request_order(values, batch, UNPOOLED.model)
    results = split([ordered], batch, requests, UNPOOLED.model)
    item, again = UNPOOLED.tables["t_item"], UNPOOLED.tables["t_again"]
    assert np.array_equal(results[0].values, [*item[[1, 2, 3, 4]], *again[[1, 2, 3]]])
    assert np.array_equal(results[1].values, item[[5, 6]])
    assert results[2].values.shape == (0, 4)
