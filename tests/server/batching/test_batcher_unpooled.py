"""Tests of batches of an unpooled model: their limits count rows, not examples."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from server.fake_engine import Bags, FakeEngine, make_request
from server.fake_models import unpooled_info
from server.pending_requests import submit

from embedserve.batching.batcher import BAG_BYTES, Batcher
from embedserve.batching.join import adapt_to_model
from embedserve.config import Limits
from embedserve.lookup_types import LookupRequest
from embedserve.metrics.model_metrics import ModelMetrics

MODEL = unpooled_info()
UNPOOLED_ITEM = 2 * 16
"""Bytes of the result for one id of item, a row of 4 float32 from each of two tables."""


def ordered(bags: Bags) -> LookupRequest:
    return adapt_to_model(make_request(bags), MODEL)


@pytest.mark.parametrize("inline_bytes_max", [0, 1 << 20])
async def test_an_unpooled_batch_ends_at_the_bytes_of_its_rows(
    executor: ThreadPoolExecutor, inline_bytes_max: int
) -> None:
    engine = FakeEngine(MODEL)
    limits = Limits(batch_output_bytes_max=5 * UNPOOLED_ITEM, inline_bytes_max=inline_bytes_max)
    batcher = Batcher(engine, engine.model, limits, ModelMetrics(engine.model), executor)
    all_bags: list[Bags] = [{"item": [[i, 9, i + 1], []], "last": [[i], [2]]} for i in range(3)]
    results = await asyncio.gather(*(submit(batcher, ordered(b)) for b in all_bags))
    assert [lookup.batch_size for lookup in engine.lookups] == [2, 2, 2]
    for bags, result in zip(all_bags, results, strict=True):
        assert np.array_equal(result.values, engine.expected(bags))
        assert result.lengths is not None
        assert result.lengths.tolist() == [[3, 0], [1, 1], [0, 0], [3, 0]]
        assert result.unknown_ids == {"item": 1}


async def test_small_unpooled_batches_run_inline_and_large_ones_in_a_thread(
    executor: ThreadPoolExecutor,
) -> None:
    engine = FakeEngine(MODEL)
    # One id reads a row of 4 float32 and writes up to two.
    bags_bytes = BAG_BYTES * len(engine.model.features)
    limits = Limits(inline_bytes_max=bags_bytes + 16 + UNPOOLED_ITEM)
    batcher = Batcher(engine, engine.model, limits, ModelMetrics(engine.model), executor)
    await submit(batcher, ordered({"item": [[1]]}))
    await submit(batcher, ordered({"item": [[1, 2]]}))
    assert [lookup.is_inline for lookup in engine.lookups] == [True, False]


async def test_many_empty_bags_are_a_large_batch(executor: ThreadPoolExecutor) -> None:
    engine = FakeEngine(MODEL)
    limits = Limits(inline_bytes_max=100 * BAG_BYTES * len(engine.model.features))
    batcher = Batcher(engine, engine.model, limits, ModelMetrics(engine.model), executor)
    await submit(batcher, ordered({"item": [[]] * 100}))
    await submit(batcher, ordered({"item": [[]] * 101}))
    assert [lookup.is_inline for lookup in engine.lookups] == [True, False]
