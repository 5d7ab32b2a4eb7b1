"""Tests of the memory bounds: their sum includes everything that clients can fill."""

from dataclasses import replace

import numpy as np
import pytest
from server.fake_engine import FakeEngine, model_info
from server.pending_requests import submit

from embedserve.batching.batcher import Batcher
from embedserve.config import DEFAULT_LIMITS, Limits
from embedserve.errors import OverloadedError
from embedserve.fanout.values_budget import BATCHES_MAX, SMALL_BYTES_MAX, VALUES_BYTES_MAX
from embedserve.lookup_types import LookupRequest
from embedserve.metrics.model_metrics import ModelMetrics
from embedserve.processes.memory_bounds import ID_BYTES, MANAGEMENT_QUEUES, memory_by_purpose
from embedserve.wire.management_turns import WAITING_BODY_BYTES_MAX

QUEUE, BATCHES = "the queue of a model", "its batches that are looked up"
FEATURES = 500
NOTHING = Limits(
    request_ids_max=0, batch_ids_max=0, request_output_bytes_max=0, batch_output_bytes_max=0
)


async def test_memory_bound_covers_a_queue_of_empty_bags() -> None:
    """Covers lengths, which take 4 bytes per bag whatever the limit of ids is."""
    model = model_info("m", {f"f{i}": (2, 2) for i in range(FEATURES)})
    limits = Limits(queue_examples_max=256, queue_ids_max=16)
    engine = FakeEngine(model)
    batcher = Batcher(engine, model, limits, ModelMetrics(model), executor=None)  # type: ignore[arg-type]
    examples = limits.queue_examples_max // 2  # a caller's share
    lengths = np.zeros(examples * FEATURES, np.int32)
    ids = np.empty(0, np.int64)
    requests = [
        LookupRequest("", model.features, ids, lengths.copy(), None, examples) for _ in range(3)
    ]
    for request in requests[:2]:
        submit(batcher, request)
    with pytest.raises(OverloadedError):  # no batch is taken before this test ends
        submit(batcher, requests[2])
    held_bytes = sum(request.lengths.nbytes for request in requests[:2])
    assert held_bytes == 256 * FEATURES * 4
    assert held_bytes <= memory_by_purpose(limits, features=FEATURES)[QUEUE]
    one_less = memory_by_purpose(limits, features=FEATURES - 1)[QUEUE]
    assert memory_by_purpose(limits, features=FEATURES)[QUEUE] - one_less == 2 * 256 * 4


@pytest.mark.parametrize(("gpus", "parts"), [(0, 0), (2, 0), (0, 3)])
def test_draining_version_counts_its_own_queue_and_batches(gpus: int, parts: int) -> None:
    one, two, three = (
        memory_by_purpose(DEFAULT_LIMITS, gpus=gpus, parts=parts, versions=count)
        for count in (1, 2, 3)
    )
    assert two[QUEUE] == 2 * one[QUEUE]
    assert two[BATCHES] - one[BATCHES] == three[BATCHES] - two[BATCHES]
    assert two[BATCHES] - one[BATCHES] >= memory_by_purpose(DEFAULT_LIMITS)[BATCHES]


def test_each_version_of_a_router_counts_its_small_batches() -> None:
    """Covers small batches, which begin immediately whatever the process's budget for values is."""
    for count in (1, 2, 3):
        values = memory_by_purpose(NOTHING, parts=3, features=0, versions=count)[BATCHES]
        assert values == VALUES_BYTES_MAX + count * BATCHES_MAX * SMALL_BYTES_MAX


@pytest.mark.parametrize("limit", ["request_ids_max", "batch_ids_max"])
def test_each_batch_of_a_router_may_be_the_largest(limit: str) -> None:
    none, some = (
        memory_by_purpose(replace(NOTHING, **{limit: ids}), parts=3, features=0)[BATCHES]
        for ids in (0, 1000)
    )
    assert some - none == BATCHES_MAX * 2 * ID_BYTES * 1000


def test_each_part_of_a_router_may_return_a_whole_result() -> None:
    limits = replace(NOTHING, request_output_bytes_max=VALUES_BYTES_MAX)
    three, six = (memory_by_purpose(limits, parts=parts)[BATCHES] for parts in (3, 6))
    assert six - three >= 3 * VALUES_BYTES_MAX


def test_bodies_of_management_requests_are_counted() -> None:
    sizes = memory_by_purpose(replace(DEFAULT_LIMITS, connections_max=0)).values()
    assert MANAGEMENT_QUEUES * WAITING_BODY_BYTES_MAX in sizes
