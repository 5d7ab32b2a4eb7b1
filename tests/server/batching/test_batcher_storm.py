"""Stress test of the batcher: thousands of requests in random batches each get their own result,
once."""

import asyncio
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from server.fake_engine import FEATURES, Bags, FakeEngine
from server.pending_requests import submit
from server.waiting import WAIT_S_MAX

from embedserve.batching.batcher import BAG_BYTES, Batcher
from embedserve.config import Limits
from embedserve.errors import EmbedServeError
from embedserve.metrics.model_metrics import ModelMetrics

CALLERS = 40
REQUESTS_EACH = 60
LIMITS = Limits(
    inline_bytes_max=300 + 4 * BAG_BYTES * len(FEATURES),
    batch_ids_max=24,
    batch_output_bytes_max=12 * 36,
    queue_examples_max=85,
    queue_ids_max=260,
)


class SometimesFailing(FakeEngine):
    """Fails every 13th lookup, and delays every 7th."""

    def lookup(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
        as_float16: bool = False,
    ) -> np.ndarray:
        count = len(self.lookups) + 1
        self.failure = RuntimeError("on order") if count % 13 == 0 else None
        self.delay_s = 0.002 if count % 7 == 0 else 0.0
        return super().lookup(ids, lengths, weights)


class Storm:
    """Callers that send, wait, cancel and abandon at random, and the outcome of each request."""

    def __init__(self, seed: int, executor: ThreadPoolExecutor) -> None:
        self.random = random.Random(seed)
        self.engine = SometimesFailing()
        self.metrics = ModelMetrics(self.engine.model)
        self.batcher = Batcher(self.engine, self.engine.model, LIMITS, self.metrics, executor)
        self.outcomes: Counter[str] = Counter()
        self.loop_errors: list[dict[str, Any]] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.loop_errors.append(context))
        async with asyncio.timeout(WAIT_S_MAX):
            await asyncio.gather(*(self._caller() for _ in range(CALLERS)))

    async def _caller(self) -> None:
        for _ in range(REQUESTS_EACH):
            self.outcomes[await self._outcome()] += 1
            await asyncio.sleep(self.random.choice((0, 0.001, 0.003)))

    async def _outcome(self) -> str:
        bags, is_bad = self._bags()
        request = self.engine.request(bags)
        deadline_s = perf_counter() + self.random.choice((0.0, 0.001, 60, 60, 60))
        try:
            source = self.random.choice((None, *"abc"))
            answer = submit(self.batcher, request, deadline_s, source)
            if self.random.random() < 0.15:
                asyncio.get_running_loop().call_later(self.random.random() / 500, answer.cancel)
            result = await answer
        except EmbedServeError as error:
            return f"{error.code} of a bad request" if is_bad else error.code
        except asyncio.CancelledError:
            return "CANCELLED"
        if is_bad:
            return "OK of a bad request"
        assert np.array_equal(result.values, self.engine.expected(bags))
        return "OK"

    def _bags(self) -> tuple[Bags, bool]:
        features = self.random.sample(list(FEATURES), self.random.randint(1, 3))
        batch_size = self.random.randint(1, 4)
        bags = {
            feature: [
                self.random.choices(range(FEATURES[feature][0]), k=self.random.randint(0, 3))
                for _ in range(batch_size)
            ]
            for feature in features
        }
        is_bad = self.random.random() < 0.1
        if is_bad:
            bags[features[0]][0].append(99)
        return bags, is_bad


@pytest.mark.parametrize("seed", range(3))
def test_every_request_gets_exactly_one_result(seed: int, executor: ThreadPoolExecutor) -> None:
    storm = Storm(seed, executor)
    asyncio.run(storm.run())
    assert storm.outcomes.total() == CALLERS * REQUESTS_EACH
    assert not {"INVALID_ARGUMENT", "OK of a bad request"} & storm.outcomes.keys()
    # Every outcome occurred; without one of them the test would prove less.
    ends = ("OK", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "INTERNAL")
    assert storm.outcomes.keys() >= {*ends, "INVALID_ARGUMENT of a bad request"}
    assert storm.outcomes["OK"] > storm.outcomes.total() / 20
    assert {lookup.is_inline for lookup in storm.engine.lookups} == {True, False}
    assert max(lookup.batch_size for lookup in storm.engine.lookups) <= 12
    assert storm.metrics.count_queue() == (0, 0)
    # A second result for a request raises in the event loop. So does an error that no code
    # retrieves.
    assert storm.loop_errors == []
