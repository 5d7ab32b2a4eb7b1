"""Cost of each step of the hot path on `small` in microseconds, measured separately and warm.

    PYTHONPATH=bench python bench/experiments/step_costs.py

A batch has 25 requests, about as many as 64 connections produce. All steps run on one core, and the
best of 15 rounds is reported.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable

from servers.embedserve import EmbedServe
from workloads import workload

from embedserve.batching.join import adapt_to_model, join
from embedserve.batching.split import split
from embedserve.codec import json_codec, protobuf_codec
from embedserve.codec.protobuf_codec import ProtobufDecoder
from embedserve.lookup_types import Batch, LookupRequest, LookupResult
from embedserve_store import ModelStore

BATCH = 25
ROUNDS = 15
REPEATS = 400


def best_us(step: Callable[[int], object]) -> float:
    """Returns the microseconds of one call in the best round. The step gets an increasing
    number."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for number in range(REPEATS):
            step(number)
        best = min(best, (time.perf_counter() - start) / REPEATS)
    return best * 1e6


def whole(batch: Batch | None) -> Batch:
    if batch is None:
        raise AssertionError("the workload's requests are valid")
    return batch


def measure() -> dict[str, float]:
    import torch

    from embedserve.engine.restore import restore
    from embedserve.processes.next_version import as_restored

    torch.set_num_threads(1)
    work, server = workload("small", "uniform"), EmbedServe()
    work.tables.make()
    version = ModelStore(work.tables.store).load(work.tables.name)
    engine = restore(version, "cpu:1")
    _, _, model = as_restored(work.tables.name, version, engine)
    as_json, as_protobuf = (
        [server.body(way, work, request) for request in work.requests] for way in server.ways[:2]
    )
    requests = [adapt_to_model(json_codec.decode_request(body, ""), model) for body in as_json]

    def some(number: int, size: int) -> list[LookupRequest]:
        start = number * size % (len(requests) - size)
        return requests[start : start + size]

    decoder = ProtobufDecoder()  # the server has one, which caches prefixes
    found = {
        "JSON decoded": best_us(lambda i: json_codec.decode_request(as_json[i], "")),
        "protobuf decoded": best_us(lambda i: decoder.decode_request(as_protobuf[i])),
    }

    def joined_and_split(size: int) -> list[LookupResult]:
        """Measures the steps of batches of ``size`` requests, and returns the results of one
        batch."""
        joined = [whole(join(some(number, size), model)) for number in range(REPEATS)]
        values = [[engine.lookup(batch.ids, batch.lengths)] for batch in joined]
        found[f"{size} joined"] = best_us(lambda i: join(some(i, size), model))
        found[f"{size} looked up"] = best_us(
            lambda i: engine.lookup(joined[i].ids, joined[i].lengths)
        )
        found[f"{size} split"] = best_us(
            lambda i: split(values[i], joined[i], some(i, size), model)
        )
        return split(values[0], joined[0], some(0, size), model)

    joined_and_split(1)
    results = joined_and_split(BATCH)
    found["JSON encoded"] = best_us(lambda i: json_codec.try_encode_inline(results[i % BATCH]))
    found["protobuf encoded"] = best_us(
        lambda i: protobuf_codec.try_encode_inline(results[i % BATCH])
    )
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.sched_setaffinity(0, {0})
    for step, us in measure().items():
        print(f"{step}: {us:.1f} us")
