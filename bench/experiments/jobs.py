"""Throughput of batch jobs: embed_in_batches on `bulk`, by client and number of requests in flight.

    PYTHONPATH=bench python bench/experiments/jobs.py [--rounds 5]

The baseline sends one request after another. The server runs on one core, the client on the other.
Clients take turns, and the medians are reported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import running
from servers.embedserve import EmbedServe
from workloads import Workload, workload

from embedserve_client import EmbedClient, EmbedResult, GrpcEmbedClient, embed_in_batches

CLIENT_CORE = 1
EXAMPLES = 512
"""Examples per request, as in `bulk`."""
IN_FLIGHT = (2, 4, 8)

Features = dict[str, tuple[np.ndarray, np.ndarray]]


def joined(work: Workload) -> Features:
    """Returns all requests of the workload as one, as (ids, lengths) of each feature."""
    features: Features = {}
    every = zip(*(request.per_feature() for request in work.requests), strict=True)
    for feature, pairs in zip(work.tables.features, every, strict=True):
        ids, lengths = zip(*pairs, strict=True)
        features[feature] = np.concatenate(ids), np.concatenate(lengths)
    return features


def one_by_one(client: EmbedClient | GrpcEmbedClient, work: Workload) -> Iterable[EmbedResult]:
    for request in work.requests:
        yield client.embed(dict(zip(work.tables.features, request.per_feature(), strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description="embed_in_batches on bulk.")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    work = workload("bulk", "uniform")
    work.tables.make()
    os.sched_setaffinity(0, {CLIENT_CORE})  # before a client starts threads
    features = joined(work)
    examples = sum(request.examples for request in work.requests)
    seconds: dict[str, list[float]] = {}
    with (
        running.running(EmbedServe(), work),
        EmbedClient(f"127.0.0.1:{running.PORT}", retries=8) as rest,
        GrpcEmbedClient(f"127.0.0.1:{running.PORT + 1}", retries=8) as grpc,
    ):
        ways: dict[str, Callable[[], Iterable[EmbedResult]]] = {}
        for name, client in (("REST", rest), ("gRPC", grpc)):
            ways[f"{name}, one by one"] = partial(one_by_one, client, work)
            for count in IN_FLIGHT:
                ways[f"{name}, {count} in flight"] = partial(
                    embed_in_batches, client, features, examples=EXAMPLES, in_flight=count
                )
        for _ in range(1 + rounds):
            for name, ask in ways.items():
                start = time.perf_counter()
                answered = sum(result.batch_size for result in ask())
                seconds.setdefault(name, []).append(time.perf_counter() - start)
                assert answered == examples
    width = work.tables.count * work.tables.dim
    for name, times in seconds.items():
        rate = examples / statistics.median(times[1:])  # the first round warms up
        print(f"{name:18} {rate:8,.0f} examples/s, {rate * width * 4 / 1e6:6,.0f} MB/s of values")


if __name__ == "__main__":
    main()
