"""Counts lost, wrong and slow batches of a router while replicas of its shards are lost.

Two parts, two replicas of each, one router: five processes that share the cores of this host with
one caller, who sends batches of 25 users one after the other. Each scenario runs until the caller
has its number of responses:

    export PYTHONPATH=server:model_store:clients:proto:tests:bench
    python bench/experiments/router_faults.py

- calm: nothing happens.
- killed: a replica is killed (SIGKILL) and started again, over and over.
- hung: a replica stands still (SIGSTOP) for the whole time.
- still: a replica stands still for 50 of every 250 ms.
- restarts: all replicas are replaced (SIGTERM), one after the other, over and over.
- overload: a thousand connections offer four times what 16 get answered, in requests of 500 users.
  The same load of one server of the whole tables follows, for comparison.

Each line ends with the router's own counts: for each part how many calls its replicas got for each
batch, and how many of them were hedges, retries, or because a replica was silent.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter

import load
import numpy as np
from e2e.parts_cluster import PARTS, Cluster, cluster, shard_metrics
from experiments.router_costs import DIM, TABLES, Batches, features_of, make_store, request_of
from operations.overload import OVERLOAD, PEAK_CONNECTIONS, offer_grpc
from running_servers import Running, running

from embedserve_client import GrpcEmbedClient
from embedserve_client.errors import EmbedServeClientError

REPLICAS, BATCHES = 2, 16
SETTLE_S = 2.0
"""Seconds for which a replica that was started again serves before the next one is lost."""
LOST_PAUSE_S = 0.02
"""Seconds that the caller waits after a batch that was lost."""
OVERLOAD_USERS = 500
"""Users in a request of the overload. A server's queue then holds fewer requests than the overload
has connections, and rejects the others."""
EMBED = "/embedserve.v1.EmbeddingService/Embed"
EXTRA_CALLS = ("hedges", "retries", "hung")


@contextmanager
def in_thread(act: Callable[[threading.Event], None]) -> Iterator[None]:
    """Runs ``act`` in a thread; its event is set at the end of the block."""
    ended = threading.Event()
    thread = threading.Thread(target=act, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def kill(shards: Cluster, ended: threading.Event) -> None:
    while not ended.is_set():
        replace(shards, 0, 0, signal.SIGKILL)
        ended.wait(SETTLE_S)


def restart(shards: Cluster, ended: threading.Event) -> None:
    while not ended.is_set():
        for key in list(shards.shards):
            replace(shards, *key, signal.SIGTERM)
            ended.wait(SETTLE_S)


def replace(shards: Cluster, part: int, replica: int, number: signal.Signals) -> None:
    """Ends a replica by a signal and starts it on its ports again; returns once it is ready."""
    process = shards.shards[part, replica].process
    process.send_signal(number)
    process.wait()
    shards.start_shard(part, replica)


def stand_still(shards: Cluster, ended: threading.Event) -> None:
    pid = shards.shards[0, 0].process.pid
    while not ended.is_set():
        os.kill(pid, signal.SIGSTOP)
        ended.wait(0.05)
        os.kill(pid, signal.SIGCONT)
        ended.wait(0.2)


def hang(shards: Cluster, ended: threading.Event) -> None:
    pid = shards.shards[0, 0].process.pid
    os.kill(pid, signal.SIGSTOP)
    ended.wait()
    os.kill(pid, signal.SIGCONT)


ACTS: dict[str, Callable[[Cluster, threading.Event], None] | None] = {
    "calm": None,
    "killed": kill,
    "hung": hang,
    "still": stand_still,
    "restarts": restart,
}


def answers_of(server: Running) -> list[np.ndarray]:
    """Returns the values of each batch."""
    with GrpcEmbedClient(server.grpc) as client:
        return [client.embed(features_of(*Batches().make(seed))).values for seed in range(BATCHES)]


def ask(server: Running, expected: Sequence[np.ndarray], is_over: Callable[[int], bool]) -> str:
    """Sends one batch after the other, until ``is_over`` of their number. Returns what the caller
    saw."""
    batches = [features_of(*Batches().make(seed)) for seed in range(BATCHES)]
    took: list[float] = []
    lost: Counter[str] = Counter()
    sent = wrong = 0
    with GrpcEmbedClient(server.grpc) as client:
        while not is_over(sent):
            start_s, number = perf_counter(), sent % BATCHES
            sent += 1
            try:
                result = client.embed(batches[number], timeout_s=10)
            except EmbedServeClientError as error:
                lost[type(error).__name__] += 1
                time.sleep(LOST_PAUSE_S)
                continue
            took.append((perf_counter() - start_s) * 1e3)
            wrong += not np.array_equal(result.values, expected[number])
    kinds = "".join(f", {count} {kind}" for kind, count in lost.items())
    said = f"{sent} batches, {lost.total()} lost{kinds}, {wrong} wrong"
    if not took:
        return said
    p50, p99, slowest = (load.quantile(took, share) for share in (0.5, 0.99, 1.0))
    over = sum(ms > 100 for ms in took)
    return f"{said}, p50 {p50:.2f} p99 {p99:.2f} slowest {slowest:.1f} ms, {over} over 100 ms"


def overload(server: Running, folder: Path, seconds: int) -> str:
    """Offers OVERLOAD times what the server answers without overload. Returns what came of it, and
    what a caller of other batches saw meanwhile."""
    expected = answers_of(server)
    body, log = folder / "body", folder / "h2load.log"
    body.write_bytes(load.framed(request_of(*Batches(users=OVERLOAD_USERS).make(BATCHES))))
    port, answer_bytes = int(server.grpc.rpartition(":")[2]), OVERLOAD_USERS * TABLES * DIM * 4
    post = load.Post(body, load.GRPC_HEADERS, port, EMBED, answer_bytes)

    def closed() -> float:
        return load.h2load(post, log, PEAK_CONNECTIONS, 1, seconds // 2).rate

    peak = closed()
    offered = OVERLOAD * peak
    with ThreadPoolExecutor(1) as pool:
        offering = pool.submit(offer_grpc, post, log, offered, seconds)
        seen = ask(server, expected, lambda _: offering.done())
    ended, peak = offering.result(), max(peak, closed())
    return (
        f"peak {peak:.0f}/s, offered {offered:.0f}/s, ended {ended.ended / seconds:.0f}/s: "
        f"{ended.ok / seconds / peak:.2f} of the peak answered, {ended.refused} rejected, "
        f"{ended.others} otherwise; meanwhile {seen}"
    )


def calls_between(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Returns the calls of replicas for each batch, by part, from metrics of the router."""
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    said = []
    for part in range(PARTS):
        batches = sum(count for name, count in grown.items() if name.startswith(f"calls {part} "))
        extra = {kind: grown[f"{kind} {part}"] / max(batches, 1) for kind in EXTRA_CALLS}
        shares = ", ".join(f"{share:.2%} {kind}" for kind, share in extra.items())
        said.append(f"part {part} {1 + sum(extra.values()):.3f} calls a batch ({shares})")
    return "; ".join(said)


def main() -> None:
    scenarios = (*ACTS, "overload")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000, help="batches of each other scenario")
    parser.add_argument("--seconds", type=int, default=16, help="of the overload")
    parser.add_argument("--scenarios", nargs="+", default=scenarios, choices=scenarios)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        store = folder / "store"
        make_store(store, PARTS)
        shards = stack.enter_context(cluster(store, folder))
        shards.start_shards(replicas=REPLICAS)
        routes = ("--shards", f"file:{shards.addresses}")
        router = stack.enter_context(running(store, folder / "router.log", *routes))
        expected = answers_of(router)
        for scenario in options.scenarios:
            before = shard_metrics(router)
            if scenario == "overload":
                said = overload(router, folder, options.seconds)
            else:
                act = ACTS[scenario]
                with nullcontext() if act is None else in_thread(partial(act, shards)):
                    said = ask(router, expected, lambda sent: sent >= options.count)
            print(f"{scenario}: {said}; {calls_between(before, shard_metrics(router))}", flush=True)
            time.sleep(SETTLE_S)
        if "overload" in options.scenarios:
            with running(store, folder / "whole.log") as whole:
                print(f"overload of one server: {overload(whole, folder, options.seconds)}")


if __name__ == "__main__":
    main()
