"""Measures deltas on a served model: rates, latencies, freshness, undo and replay.

    PYTHONPATH=bench:tests python bench/experiments/deltas.py rates|latency|served|undo|replay \\
        [--rows-per-minute 1000000] [--rounds 6] [--seconds 5] [--store s3://bucket/folder] \\
        [--alone] [--rows 10000] [--notify redis://127.0.0.1:6379]

The model has 8 tables of 100,000 rows of 64 float32. The server runs on core 0, wrk with 64
connections on core 1; ``replay``, without load, also on both. The deltas of ``latency`` are written
before, and published by links, so that no trainer takes the load's core.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import load
import numpy as np
import torch
from load import need, pinned
from running_servers import command, started, wait_until_ready

from embedserve_store import DeltaWriter, TableSpec, publish, undo_deltas

MODEL, TABLES, ROWS, DIM = "m", 8, 100_000, 64
MEMORY = 2 << 30
FOLLOW = ("--deltas", "follow", "--delta-memory", str(MEMORY))
LINE = f"{MODEL}/deltas/1"
LARGE = 10_000
"""Rows of each table in a delta of 20 MiB."""
CONNECTIONS = 64
READY_S_MAX = 120.0
PORT = 18_180
RANDOM = np.random.default_rng(0)


def publish_model(store: str | Path) -> None:
    weights = {
        f"ebc.embedding_bags.t{table}.weight": torch.rand(ROWS, DIM) for table in range(TABLES)
    }
    tables = [
        TableSpec(f"t{table}", ROWS, DIM, (f"f{table}",), "sum", "float32")
        for table in range(TABLES)
    ]
    publish(weights, store, model=MODEL, tables=tables)


def changes(rows: int) -> dict[str, Any]:
    """Returns ``rows`` random rows of each table, and values for them."""
    return {
        f"t{table}": (
            np.sort(RANDOM.choice(ROWS, rows, replace=False)),
            RANDOM.random((rows, DIM), dtype=np.float32),
        )
        for table in range(TABLES)
    }


@contextmanager
def serving(store: str | Path, port: int, *options: str, cores: str = "0") -> Iterator[str]:
    """Runs a server on ``cores``, and yields its URL once it is ready."""
    url = f"http://127.0.0.1:{port}"
    words = command("serve", store, "--http-port", port, "--grpc-port", port + 1, *options)
    with (
        tempfile.NamedTemporaryFile() as file,
        started(pinned(cores, words), Path(file.name), is_warm=False) as server,
    ):
        wait_until_ready(server, Path(file.name), url)
        yield url


def deltas(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/models", timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)["models"][0]["deltas"]
    return found


def until(is_true: Any, every_s: float) -> None:
    end_s = time.monotonic() + READY_S_MAX
    while not is_true():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not so after {READY_S_MAX:g} s")
        time.sleep(every_s)


class Load:
    """wrk with requests of one example, which has up to 8 ids of each feature."""

    def __init__(self, folder: Path, seconds: int) -> None:
        self._script, self._seconds = folder / "post.lua", seconds
        bodies = [self._body() for _ in range(300)]
        headers = [{"Content-Type": "application/json"}] * len(bodies)
        load.lua(self._script, "/embed", bodies, headers)

    def _body(self) -> bytes:
        bags = {
            f"f{table}": [RANDOM.integers(0, ROWS, RANDOM.integers(0, 9)).tolist()]
            for table in range(TABLES)
        }
        return json.dumps({"features": bags}).encode()

    def run(self, url: str) -> tuple[float, float]:
        """Returns requests per second, and the p99 in ms."""
        port = int(url.rpartition(":")[2])
        figures = load.http(self._script, port, CONNECTIONS, self._seconds)
        if figures.errors or figures.p99_ms is None:
            raise AssertionError(figures)
        return figures.rate, figures.p99_ms


def rates(store: Path, wrk: Load, rounds: int) -> None:
    """Prints requests per second with 0, 1 and 10 % of rows changed, by those without deltas."""
    publish_model(store)
    with (
        serving(store, PORT) as plain,
        serving(store, PORT + 10, *FOLLOW) as following,
        DeltaWriter(store, model=MODEL) as writer,
    ):
        for url in (plain, following):
            wrk.run(url)
        for percent in (0, 1, 10):
            if percent:
                seq = writer.push_rows(changes(ROWS * percent // 100))
                until(lambda: deltas(following)["seq"] == seq, 0.01)  # noqa: B023
            pairs = [(wrk.run(plain)[0], wrk.run(following)[0]) for _ in range(rounds)]
            ratio = statistics.median(after / before for before, after in pairs)
            print(f"{percent:2} % changed: {ratio:.3f} of the rate without deltas; {pairs}")


def latency(store: Path, wrk: Load, rounds: int, seconds: int, rows_per_minute: int) -> None:
    """Prints the p99 without and with deltas, in alternating rounds."""
    publish_model(store)
    written = store.with_name("written")
    shutil.copytree(store, written)
    rows = max(1, min(LARGE, rows_per_minute // 60 // 10 // TABLES))
    every_s = rows * TABLES * 60 / rows_per_minute
    count = round(rounds * seconds / every_s)
    some = [changes(rows) for _ in range(10)]
    with DeltaWriter(written, model=MODEL) as writer:
        for number in range(count):
            writer.push_rows(some[number % len(some)])
    files: dict[int, list[Path]] = {}
    for path in sorted((written / LINE).iterdir(), reverse=True):  # manifests come last
        files.setdefault(int(path.name[:20]), []).append(path)
    (store / LINE).mkdir(parents=True)
    waiting = iter(sorted(files.items()))
    calm, busy, lags = [], [], []
    with serving(store, PORT, *FOLLOW) as url:
        wrk.run(url)
        for _ in range(rounds):
            calm.append(wrk.run(url)[1])
            is_over = threading.Event()

            def push(is_over: threading.Event = is_over) -> None:
                due_s = time.monotonic()
                while not is_over.is_set() and (found := next(waiting, None)):
                    for path in found[1]:
                        os.link(path, store / LINE / path.name)
                    due_s += every_s
                    time.sleep(max(0.0, due_s - time.monotonic()))

            thread = threading.Thread(target=push)
            thread.start()
            busy.append(wrk.run(url)[1])
            is_over.set()
            thread.join()
            lags.append(deltas(url)["wanted_seq"] - deltas(url)["seq"])
            until(lambda: deltas(url)["state"] == "following", 0.05)
    ratio = statistics.median(busy) / statistics.median(calm)
    print(f"{rows_per_minute:,} rows/min: p99 {ratio:.2f} of calm; calm {calm}, busy {busy} ms")
    print(f"deltas of {rows * TABLES} rows that waited at the end of each round: {lags}")


def served(store: str | Path, rounds: int, count: int, notify: str, *, is_alone: bool) -> None:
    """Prints seconds from a trainer's rows to their being served, for ``count`` rows of each
    table; pushes begin at random times between two polls."""
    publish_model(store)
    pushed, total = [], []
    options = (*FOLLOW, "--delta-notify", notify) if notify else FOLLOW
    with (
        serving(store, PORT, *options) as url,
        DeltaWriter(store, model=MODEL, notify=notify or None, is_alone=is_alone) as writer,
    ):
        for _ in range(rounds):
            rows = changes(count)
            start_s = time.perf_counter()
            seq = writer.push_rows(rows)
            pushed.append(time.perf_counter() - start_s)
            until(lambda: deltas(url)["seq"] == seq, 0.002)  # noqa: B023
            total.append(time.perf_counter() - start_s)
            time.sleep(0.2 + 0.3 * RANDOM.random())
    for name, seconds in (("push", pushed), ("trainer to served", total)):
        print(
            f"{name}: median {statistics.median(seconds):.3f} s, {min(seconds):.3f} to "
            f"{max(seconds):.3f} s"
        )


def undo(store: Path, rounds: int) -> None:
    """Prints milliseconds of the step that takes deltas back, as the server counts them."""
    publish_model(store)
    with serving(store, PORT, *FOLLOW) as url, DeltaWriter(store, model=MODEL) as writer:
        for count in (1, 20):
            took = []
            for _ in range(rounds):
                for _ in range(count):
                    seq = writer.push_rows(changes(LARGE))
                    until(lambda: deltas(url)["seq"] == seq, 0.01)  # noqa: B023
                before_s = apply_seconds(url)
                made = undo_deltas(store, MODEL, to=seq - count, why="bench")
                until(lambda: deltas(url)["seq"] == made.seq, 0.01)  # noqa: B023
                took.append(1e3 * (apply_seconds(url) - before_s))
                writer.resume()
            print(f"undo of {count} deltas of {LARGE * TABLES} rows: {sorted(took)} ms")


def apply_seconds(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        found = re.search(
            r"^embedserve_delta_apply_seconds_sum\S* (\S+)", answer.read().decode(), re.M
        )
    return float(found[1]) if found else 0.0


def replay(store: Path, rounds: int) -> None:
    """Prints rows per second that a starting server applies, and seconds until it is ready, on one
    core and on two: the applier replays while a worker is restored."""
    publish_model(store)
    count = 20
    with DeltaWriter(store, model=MODEL) as writer:
        for _ in range(count):
            writer.push_rows(changes(LARGE))
    rows = count * LARGE * TABLES
    for cores in ("0", "0,1") * rounds:
        start_s = time.perf_counter()
        with serving(store, PORT, *FOLLOW, cores=cores) as url:
            ready_s, apply_s = time.perf_counter() - start_s, apply_seconds(url)
        start_s = time.perf_counter()
        with serving(store, PORT, cores=cores):
            plain_s = time.perf_counter() - start_s
        print(
            f"cores {cores}: {rows:,} rows in {apply_s:.2f} s: {rows / apply_s / 1e6:.2f} M/s; "
            f"ready after {ready_s:.1f} s, without deltas {plain_s:.1f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("rates", "latency", "served", "undo", "replay"))
    parser.add_argument("--rows-per-minute", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=LARGE, help="of each table, for `served`")
    parser.add_argument("--notify", default="", help="broker for `served`. Default: polls")
    parser.add_argument("--store", help="empty store for `served`. Default: a folder")
    parser.add_argument("--alone", action="store_true", help="is_alone of DeltaWriter, `served`")
    chosen = parser.parse_args()
    need("wrk")
    with tempfile.TemporaryDirectory(prefix="bench-deltas-") as folder:
        store = Path(folder) / "store"
        wrk = Load(Path(folder), chosen.seconds)
        match chosen.what:
            case "rates":
                rates(store, wrk, chosen.rounds)
            case "latency":
                latency(store, wrk, chosen.rounds, chosen.seconds, chosen.rows_per_minute)
            case "served":
                served(
                    chosen.store or store,
                    chosen.rounds,
                    chosen.rows,
                    chosen.notify,
                    is_alone=chosen.alone,
                )
            case "undo":
                undo(store, chosen.rounds)
            case "replay":
                replay(store, chosen.rounds)


if __name__ == "__main__":
    main()
