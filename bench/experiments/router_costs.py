"""Measures what a router adds to a lookup, beside one server of the same tables.

Eight 64-dim float32 tables of 100,000 rows; batches of 25 users with 0 to 8 ids a feature. All
processes share the cores of this host. Run it on an idle machine:

    PYTHONPATH=server:model_store:clients:proto:tests:bench python bench/experiments/router_costs.py

Each round asks the server of whole tables and then the routers; the ratios within a round are what
counts. With ``--small 4`` four of the tables have 1,000 rows, and a router that looks them up
itself (``--local-bytes``) is measured beside one that calls shards for them. With ``--row-cache
BYTES`` ids have Zipf's distribution, and a router that keeps rows is measured beside one that does
not. With ``--pinned`` the callers and the servers they ask share a core, and the shards have the
cores in turn: otherwise the kernel may run two shards on one core while another is idle.

Reports milliseconds of one caller with the CPU time of all shards, batches/s of 16 callers, and the
CPU time and bytes of a router for a batch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from time import perf_counter, thread_time

import grpc
import numpy as np
import torch
import uvloop
from e2e.parts_cluster import Cluster
from pooled import collection
from processes import cpu_seconds
from running_servers import Running, running
from torchrec import PoolingType

from embedserve.config import ServeSettings
from embedserve.errors import EmbedServeError
from embedserve.fanout.router_engine import RouterEngine
from embedserve.fanout.shards import Shards
from embedserve.lookup_types import Batch
from embedserve_client import AsyncGrpcEmbedClient
from embedserve_proto import embedding_pb2
from embedserve_store import LocalTables, ModelStore, publish

TABLES, ROWS, DIM, USERS, IDS_MAX = 8, 100_000, 64, 25, 8
SMALL_ROWS = 1000
IN_FLIGHT = 16
"""Batches that callers have in flight when the rate is measured."""
LOCAL_BYTES = 64 << 20
ZIPF = 1.05
"""Exponent of the distribution of ids with a row cache."""
DISTINCT, DISTINCT_ZIPF = 16, 4000
"""Distinct batches. With a row cache they are many, as their rows must not all be in it."""


def rows_of(table: int, small: int) -> int:
    """Returns the rows of a table, if the first ``small`` tables are small."""
    return SMALL_ROWS if table < small else ROWS


def make_store(store: Path, parts: int, small: int = 0) -> None:
    torch.manual_seed(0)
    tables = [(f"t{i}", rows_of(i, small), DIM, [f"f{i}"], PoolingType.SUM) for i in range(TABLES)]
    publish(collection(tables), store, model="m", hosts=parts)


class Batches:
    """Random batches.

    Attributes:
        distinct: number of distinct ones that are to be sent.
        users: examples of a batch.
    """

    def __init__(self, small: int = 0, users: int = USERS, *, is_zipf: bool = False) -> None:
        """
        Args:
            small: tables of SMALL_ROWS rows.
            users: examples of a batch.
            is_zipf: whether some ids are frequent.
        """
        self._small, self.users = small, users
        self.distinct = DISTINCT_ZIPF if is_zipf else DISTINCT
        self._ends = (np.arange(1, ROWS + 1) ** -ZIPF).cumsum() if is_zipf else None
        self._by_frequency = np.random.default_rng(0).permutation(ROWS)

    def make(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ids, lengths) of a batch."""
        random, users = np.random.default_rng(seed), self.users
        lengths = random.integers(0, IDS_MAX + 1, TABLES * users).astype(np.int32)
        rows = np.repeat([rows_of(i // users, self._small) for i in range(lengths.size)], lengths)
        if self._ends is None:
            return random.integers(0, rows), lengths
        ranks = np.searchsorted(self._ends, random.random(rows.size) * self._ends[-1])
        return self._by_frequency[ranks] % rows, lengths


def features_of(ids: np.ndarray, lengths: np.ndarray) -> dict[str, list[list[int]]]:
    bags, users = np.split(ids, lengths.cumsum()[:-1]), lengths.size // TABLES
    return {
        f"f{i}": [bag.tolist() for bag in bags[i * users : (i + 1) * users]] for i in range(TABLES)
    }


def request_of(ids: np.ndarray, lengths: np.ndarray) -> bytes:
    return embedding_pb2.EmbedRequest(
        keys=[f"f{i}" for i in range(TABLES)],
        ids_bytes=ids.tobytes(),
        lengths_bytes=lengths.tobytes(),
    ).SerializeToString()


def time_one(server: Running, count: int, batches: Batches) -> np.ndarray:
    """Returns the sorted milliseconds of ``count`` batches, one at a time, as bytes."""
    requests = [request_of(*batches.make(seed)) for seed in range(batches.distinct)]
    took = []
    with grpc.insecure_channel(server.grpc) as channel:
        embed = channel.unary_unary("/embedserve.v1.EmbeddingService/Embed")
        for i in range(count + 20):
            start_s = perf_counter()
            embed(requests[i % len(requests)])
            took.append(perf_counter() - start_s)
    return np.sort(took[20:]) * 1e3


async def time_many(server: Running, seconds: float, batches: Batches) -> float:
    """Returns batches/s with IN_FLIGHT in flight."""
    requests = [features_of(*batches.make(seed)) for seed in range(batches.distinct)]
    end_s, done = perf_counter() + seconds, 0

    async def ask(client: AsyncGrpcEmbedClient, i: int) -> None:
        nonlocal done
        while perf_counter() < end_s:
            await client.embed(requests[(i + done) % len(requests)])
            done += 1

    async with AsyncGrpcEmbedClient(server.grpc) as client:
        await asyncio.gather(*(ask(client, i) for i in range(IN_FLIGHT)))
    return done / seconds


def own_work(settings: ServeSettings, count: int, batches: Batches) -> tuple[float, float]:
    """Returns the median CPU microseconds of this thread, and the mean bytes of the parts' values,
    for a batch, after as many others."""
    shards = Shards(settings)
    version = ModelStore(settings.store, selection=LocalTables(settings.local_bytes)).load("m")
    engine = shards.open_all({"m": version}, is_shown=False)["m"]
    return uvloop.run(_own_work(shards, engine, count, batches))


async def _own_work(
    shards: Shards, engine: RouterEngine, count: int, batches: Batches
) -> tuple[float, float]:
    await shards.start()
    loop, cpu_s, before = asyncio.get_running_loop(), [], 0
    for i in range(2 * count):
        if i == count:
            before = sum(client.stats.bytes_received for client in shards.clients())
        ids, lengths = batches.make(i)
        batch = Batch(ids, lengths, None, [batches.users], batches.users)
        ended: asyncio.Future[np.ndarray | EmbedServeError] = loop.create_future()
        start_s = thread_time()
        engine.begin(batch, perf_counter() + 5, ended.set_result)
        await ended
        cpu_s.append(thread_time() - start_s)
    received = sum(client.stats.bytes_received for client in shards.clients()) - before
    return float(np.median(cpu_s[count:])) * 1e6, received / count


def pin(pid: int, core: int) -> None:
    """Runs all threads of a process, and those that they start, on one core."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), {core})


def measure(
    parts: int,
    rounds: int,
    count: int,
    small: int,
    row_cache: int,
    users: int,
    *,
    is_pinned: bool = False,
) -> None:
    batches = Batches(small, users, is_zipf=row_cache > 0)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        store = folder / "store"
        make_store(store, parts, small)
        shards = Cluster(store, folder, parts, stack)
        shards.start_shards()
        pids = [one.process.pid for one in shards.shards.values()]
        router = ServeSettings(str(store), shards=f"file:{shards.addresses}")
        routers = {"router": router}
        if small:
            routers["router with small tables"] = replace(router, local_bytes=LOCAL_BYTES)
        if row_cache:
            routers["router with a row cache"] = replace(router, row_cache=row_cache)
        servers = {"whole": stack.enter_context(running(store, folder / "whole.log"))}
        for name, settings in routers.items():
            cpu_us, received = own_work(settings, count, batches)
            print(
                f"{parts} parts, {name}: own CPU {cpu_us:.0f} us a batch, "
                f"{received / 1e3:.0f} KB back"
            )
            options = ["--shards", settings.shards, "--local-bytes", str(settings.local_bytes)]
            options += ["--row-cache", str(settings.row_cache)]
            servers[name] = stack.enter_context(running(store, folder / f"{name}.log", *options))
        if is_pinned:
            cores = sorted(os.sched_getaffinity(0))
            for one in servers.values():
                pin(one.process.pid, cores[-1])
            for pid, core in zip(pids, cycle(cores), strict=False):
                pin(pid, core)
            pin(os.getpid(), cores[-1])
        for _ in range(rounds):
            line = []
            for name, server in servers.items():
                before_s = sum(map(cpu_seconds, pids))
                took = time_one(server, count, batches)
                shards_s = sum(map(cpu_seconds, pids)) - before_s
                rate = uvloop.run(time_many(server, 3, batches))
                p50, p99 = took[len(took) // 2], took[int(len(took) * 0.99)]
                line.append(
                    f"{name} p50 {p50:.2f} p99 {p99:.2f} ms, shards {shards_s / count * 1e6:.0f} "
                    f"us, {rate:.0f} batches/s"
                )
            print("   ", "; ".join(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--small", type=int, default=0, help="tables of 1,000 rows, of 8")
    parser.add_argument("--row-cache", type=int, default=0, help="bytes of a router's row cache")
    parser.add_argument("--users", type=int, default=USERS, help="of a batch")
    parser.add_argument("--pinned", action="store_true", help="pins each process to a core")
    options = parser.parse_args()
    for parts in options.parts:
        measure(
            parts,
            options.rounds,
            options.count,
            options.small,
            options.row_cache,
            options.users,
            is_pinned=options.pinned,
        )


if __name__ == "__main__":
    main()
