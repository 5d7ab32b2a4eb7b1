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
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
from experiments.router_costs import features_of, make_batch, make_store
from running_servers import Running, free_port, running

from embedserve_client import GrpcEmbedClient
from embedserve_client.errors import EmbedServeClientError

PARTS, REPLICAS, BATCHES = 2, 2, 16
SETTLE_S = 2.0
"""Seconds for which a replica that was started again serves before the next one is lost."""


@dataclass
class Shards:
    """Replicas by (part, number), each on ports of its own."""

    store: Path
    folder: Path
    stack: dict[tuple[int, int], ExitStack] = field(default_factory=dict)
    running: dict[tuple[int, int], Running] = field(default_factory=dict)
    ports: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def start(self, part: int, number: int) -> None:
        """Starts a replica on the ports that it had before, and returns once it is ready."""
        key = part, number
        ports = self.ports.setdefault(key, (free_port(), free_port()))
        log = self.folder / f"shard-{part}-{number}.log"
        stack = self.stack[key] = ExitStack()
        self.running[key] = stack.enter_context(
            running(self.store, log, "--part", f"{part}/{PARTS}", ports_used=ports)
        )

    def stop(self, part: int, number: int) -> None:
        """Ends a replica by SIGTERM."""
        self.stack.pop((part, number)).close()

    def close(self) -> None:
        for stack in self.stack.values():
            stack.close()


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


def kill(shards: Shards, ended: threading.Event) -> None:
    while not ended.is_set():
        shards.running[0, 0].process.kill()
        shards.stop(0, 0)
        shards.start(0, 0)
        ended.wait(SETTLE_S)


def restart(shards: Shards, ended: threading.Event) -> None:
    while not ended.is_set():
        for key in list(shards.ports):
            shards.stop(*key)
            shards.start(*key)
            ended.wait(SETTLE_S)


def stand_still(shards: Shards, ended: threading.Event) -> None:
    pid = shards.running[0, 0].process.pid
    while not ended.is_set():
        os.kill(pid, signal.SIGSTOP)
        ended.wait(0.05)
        os.kill(pid, signal.SIGCONT)
        ended.wait(0.2)


def hang(shards: Shards, ended: threading.Event) -> None:
    pid = shards.running[0, 0].process.pid
    os.kill(pid, signal.SIGSTOP)
    ended.wait()
    os.kill(pid, signal.SIGCONT)


ACTS: dict[str, Callable[[Shards, threading.Event], None] | None] = {
    "calm": None,
    "killed": kill,
    "hung": hang,
    "still": stand_still,
    "restarts": restart,
}


def ask(router: Running, expected: list[np.ndarray], count: int) -> str:
    """Returns what a caller saw of ``count`` batches."""
    batches = [features_of(*make_batch(seed)) for seed in range(BATCHES)]
    took, lost, wrong = [], 0, 0
    with GrpcEmbedClient(router.grpc) as client:
        for i in range(count):
            start_s = perf_counter()
            try:
                result = client.embed(batches[i % BATCHES], timeout_s=10)
            except EmbedServeClientError:
                lost += 1
                continue
            took.append((perf_counter() - start_s) * 1e3)
            wrong += not np.array_equal(result.values, expected[i % BATCHES])
    sorted_ms = np.sort(took)
    p50, p99 = sorted_ms[len(took) // 2], sorted_ms[int(len(took) * 0.99)]
    over = int((sorted_ms > 100).sum())
    return (
        f"{count} batches, {lost} lost, {wrong} wrong, p50 {p50:.2f} p99 {p99:.2f} "
        f"slowest {sorted_ms[-1]:.1f} ms, {over} over 100 ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--scenarios", nargs="+", default=list(ACTS), choices=ACTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        store, addresses = folder / "store", folder / "shards.json"
        make_store(store, PARTS)
        shards = Shards(store, folder)
        stack.callback(shards.close)
        for part in range(PARTS):
            for number in range(REPLICAS):
                shards.start(part, number)
        found = {
            str(part): [shards.running[part, n].grpc for n in range(REPLICAS)]
            for part in range(PARTS)
        }
        addresses.write_text(json.dumps(found))
        routes = ("--shards", f"file:{addresses}")
        router = stack.enter_context(running(store, folder / "router.log", *routes))
        with GrpcEmbedClient(router.grpc) as client:
            expected = [
                client.embed(features_of(*make_batch(seed))).values for seed in range(BATCHES)
            ]
        for scenario in options.scenarios:
            act = ACTS[scenario]
            acting = nullcontext() if act is None else in_thread(partial(act, shards))
            with acting:
                print(f"{scenario}: {ask(router, expected, options.count)}", flush=True)
            time.sleep(SETTLE_S)


if __name__ == "__main__":
    main()
