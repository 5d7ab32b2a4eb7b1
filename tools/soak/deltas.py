"""make soak-deltas: deltas, undos, compactions and kills under load, for minutes or hours.

A trainer process pushes rows at a steady rate. The rows of a delta follow from its seq, and each
value is the seq. Callers check that every response has rows of one delta, and never of an older one
than the response before. Meanwhile deltas are undone and compacted, and the trainer, the applier
and the workers are killed. At the end, all rows must be those of the last seq. Prints one table.

    make soak-deltas SOAK="--minutes 30 --kills 30 --rows-per-minute 1000000"
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from processes import children, memory_bytes
from running_servers import free_port
from soak.delta_clients import (
    DIM,
    MODEL,
    PUSH_EVERY_S,
    ROWS,
    TABLES,
    call,
    changed_rows,
    train,
)

from embedserve.deltas.applier_process import PROCESS_NAME
from embedserve_client import EmbedClient
from embedserve_store import (
    DeltaLine,
    ModelStore,
    StoreError,
    TableSpec,
    compact_deltas,
    publish,
    undo_deltas,
)

UNDO_EVERY_S = 20.0
UNDONE_MAX = 100
"""Most deltas that are undone at once. Some of these undos go past the memory for undos."""
COMPACT_EVERY_S = 300.0
SAMPLE_EVERY_S = 0.5
CALM_S = 10.0
"""Seconds after a kill that do not count for the lag."""
MEMORY = 512 << 20
UNDO = 64
WORKERS = 2
SETTLED_S_MAX = 120.0
SERVE = """
from embedserve.processes import forked
forked.RESTART_DELAY_S_MAX = 0.1  # else processes that are killed often are restarted ever later
from embedserve.__main__ import main
main()
"""


@dataclass
class Report:
    """Outcome of a run."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    """Lag at each sample that is not soon after a kill."""
    memory: list[int] = field(default_factory=list)
    """Bytes of changed rows at each sample."""
    supervised: list[int] = field(default_factory=list)
    """Private bytes of all processes of the server at each sample."""


class DeltaSoak:
    """A server, a trainer and callers, and what happens to them."""

    def __init__(self, folder: Path, rows_per_minute: int, seed: int, devices: str) -> None:
        self.report = Report()
        self._store = folder / "store"
        self._random = Random(seed)
        self._rows_per_push = round(rows_per_minute * PUSH_EVERY_S / 60)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["soak.delta_clients", "torch"])
        self._http, grpc = free_port(), free_port()
        weights = {
            f"ebc.embedding_bags.t{table}.weight": torch.zeros(ROWS, DIM) for table in range(TABLES)
        }
        tables = [
            TableSpec(f"t{table}", ROWS, DIM, (f"f{table}",), "sum", "float32")
            for table in range(TABLES)
        ]
        publish(weights, self._store, model=MODEL, tables=tables)
        workers = 1 if devices == "cuda" else WORKERS
        options = ("--deltas", "follow", "--workers", workers, "--delta-memory", MEMORY)
        ports = ("--http-port", self._http, "--grpc-port", grpc)
        # Versions that are compacted meanwhile are not for this server.
        model = ("--model", f"{MODEL}@1", "--devices", devices)
        arguments = ("serve", self._store, *model, *ports, *options)
        with (folder / "server.log").open("wb") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-c", SERVE, *map(str, arguments)], stdout=log, stderr=log
            )
        self._await(lambda: self._models() is not None)
        self._trainer = self._start_trainer()
        self._pipe, theirs = self._context.Pipe()
        where = f"http://127.0.0.1:{self._http}", f"127.0.0.1:{grpc}"
        self._callers = self._context.Process(target=call, args=(*where, theirs))
        self._callers.start()

    def run(self, minutes: float, kills: int) -> None:
        start_s = time.monotonic()
        end_s = start_s + 60 * minutes
        kill_every_s = 60 * minutes / kills if kills else float("inf")
        kill_s, undo_s = start_s + kill_every_s, start_s + UNDO_EVERY_S
        compact_s, calm_s = start_s + COMPACT_EVERY_S, start_s + CALM_S
        while (now := time.monotonic()) < end_s:
            if now >= kill_s:
                self._kill()
                kill_s, calm_s = kill_s + kill_every_s, now + CALM_S
            if now >= undo_s:
                self._undo()
                undo_s += UNDO_EVERY_S
            if now >= compact_s:
                self._compact()
                compact_s += COMPACT_EVERY_S
            self._sample(is_calm=now >= calm_s)
            time.sleep(min(SAMPLE_EVERY_S, max(0.0, kill_s - time.monotonic())))
        self._finish()

    def close(self) -> None:
        for process in (self._trainer, self._callers):
            process.kill()
            process.join()
        self._server.terminate()
        self._server.wait(60)

    def _start_trainer(self) -> BaseProcess:
        process = self._context.Process(target=train, args=(str(self._store), self._rows_per_push))
        process.start()
        return process

    def _kill(self) -> None:
        """Kills the applier, a worker or the trainer."""
        victim = self._random.choices(("applier", "worker", "trainer"), (3, 1, 1))[0]
        if victim == "trainer":
            self._trainer.kill()
            self._trainer.join()
            self._trainer = self._start_trainer()
        else:
            processes = self._processes()
            found = [
                pid for pid, is_applier in processes.items() if is_applier == (victim[0] == "a")
            ]
            if not found:
                return
            with suppress(ProcessLookupError):
                os.kill(self._random.choice(found), signal.SIGKILL)
        self.report.counts[f"{victim}s killed"] += 1

    def _processes(self) -> dict[int, bool]:
        """Returns the server's processes, and whether each is the applier."""
        found = {}
        for pid in children(self._server.pid):
            with suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                found[pid] = name == PROCESS_NAME
        return found

    def _undo(self) -> None:
        last = self._line().seqs()[-1]
        with suppress(StoreError):
            undo_deltas(
                self._store,
                MODEL,
                to=max(0, last - self._random.randint(1, UNDONE_MAX)),
                why="soak",
                version=1,
            )
            self.report.counts["undos"] += 1

    def _compact(self) -> None:
        made = compact_deltas(self._store, MODEL, version=1)
        seq = made.manifest.source["line_seq"]
        version = ModelStore(self._store).load(MODEL, made.version)
        for table, expected in enumerate(self._state(seq)):
            rows = version.tables.rows(f"t{table}").view(np.float32)[:, 0]
            if not np.array_equal(rows, expected):
                self.report.wrong.append(f"compacted {seq}: table t{table} differs")
        self.report.counts["compactions"] += 1

    def _line(self) -> DeltaLine:
        models = ModelStore(self._store)
        return DeltaLine(models, models.manifest(MODEL, 1))

    def _state(self, seq: int) -> list[NDArray[np.float32]]:
        """Returns the value of each row after delta ``seq``."""
        tables = [np.zeros(ROWS, np.float32) for _ in range(TABLES)]
        for kept in [delta.seq for delta in self._line().kept(seq)][::-1]:
            for table, values in enumerate(tables):
                values[changed_rows(kept, table, self._rows_per_push // TABLES)] = kept
        return tables

    def _models(self) -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._http}/models", timeout=10
            ) as said:
                found: dict[str, Any] = json.load(said)["models"][0]["deltas"]
        except (OSError, LookupError, ValueError):
            return None
        return found

    def _sample(self, *, is_calm: bool) -> None:
        if (now := self._models()) is None:
            return
        if is_calm:
            self.report.lags_s.append(now["lag_s"])
        self.report.memory.append(now["memory_bytes"])
        private = 0
        for pid in children(self._server.pid):
            with suppress(OSError):
                private += memory_bytes(pid)["Anonymous"]
        self.report.supervised.append(private)

    def _finish(self) -> None:
        """Ends the trainer and the callers, and compares all rows with those of the last seq."""
        self._trainer.kill()
        self._trainer.join()
        last = self._line().seqs()[-1]
        self._await(lambda: (now := self._models()) is not None and now["seq"] == last)
        self._pipe.send("stop")
        wrong, values, counts = self._pipe.recv()
        self.report.wrong += wrong
        self.report.counts += counts
        self.report.counts["deltas"] = last
        newest = {}
        line = self._line()
        for seq, found in values.items():
            first = next(line.kept(seq), None)
            newest[seq] = float(first.seq if first else 0)
            if found != {newest[seq]}:
                self.report.wrong.append(f"seq {seq}: {found}, expected {newest[seq]}")
        self.report.counts["seqs that callers saw"] = len(newest)
        some = slice(0, ROWS, ROWS // 400)
        bags = [[row] for row in range(ROWS)[some]]
        with EmbedClient(f"http://127.0.0.1:{self._http}") as client:
            result = client.embed({f"f{table}": bags for table in range(TABLES)})
        for table, expected in enumerate(self._state(last)):
            if not np.array_equal(result.values[:, table * DIM], expected[some]):
                self.report.wrong.append(f"at the end table t{table} differs")

    def _await(self, is_true: Callable[[], bool]) -> None:
        end_s = time.monotonic() + SETTLED_S_MAX
        while not is_true():
            if time.monotonic() > end_s or self._server.poll() is not None:
                raise AssertionError(f"the server does not settle: {self._models()}")
            time.sleep(0.1)


def print_report(report: Report) -> None:
    for what, count in sorted(report.counts.items()):
        print(f"{count:10,} {what}")
    p99_s, most_s = np.quantile(report.lags_s or [0], 0.99), max(report.lags_s, default=0)
    print(f"lag, but for {CALM_S:g} s after a kill: p99 {p99_s:.2f} s, at most {most_s:.2f} s")
    for name, samples in (("changed rows", report.memory), ("processes", report.supervised)):
        thirds = [max(one) / 1e6 for one in np.array_split(samples, 3)]
        print(f"memory of {name}: {', '.join(f'{one:.0f}' for one in thirds)} MB in each third")
    print(f"wrong: {len(report.wrong)}")
    for one in report.wrong[:20]:
        print("  ", one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--rows-per-minute", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--devices", default="cpu", help="as of embedserve serve")
    parser.add_argument("--output", type=Path, help="folder for the store and the log")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-deltas-") as where:
        folder = chosen.output or Path(where)
        folder.mkdir(parents=True, exist_ok=True)
        with closing(
            DeltaSoak(folder, chosen.rows_per_minute, chosen.seed, chosen.devices)
        ) as soak:
            soak.run(chosen.minutes, chosen.kills)
    print_report(soak.report)
    sys.exit(1 if soak.report.wrong else 0)


if __name__ == "__main__":
    main()
