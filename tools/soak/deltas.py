"""make soak-deltas: deltas, undos, compactions and kills under load, for minutes or hours.

A trainer process pushes rows at a steady rate. The rows of a delta follow from its seq, and each
value is the seq. Callers check that every response has rows of one delta, and never of an older one
than the response before. Meanwhile deltas are undone and compacted, and the trainer, the applier
and the workers are killed. At the end, all rows must be those of the last seq. Prints one table.

With --ids the deltas also add and remove ids, and every response must have the ids of its delta.
With --alias the server has a second name for the version, an alias that is moved to a delta, back,
and on again.

    make soak-deltas SOAK="--minutes 30 --kills 30 --rows-per-minute 1000000 --ids --alias"
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
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from processes import children, memory_bytes
from running_servers import free_port
from soak import delta_ids
from soak.delta_clients import (
    ALIAS,
    ALIAS_NAME,
    DIM,
    MODEL,
    NAME,
    PUSH_EVERY_S,
    ROWS,
    TABLES,
    Found,
    call,
    changed_rows,
    train,
)
from soak.delta_report import CALM_S, Report, print_report

from embedserve.deltas.applier_process import PROCESS_NAME
from embedserve_client import EmbedClient
from embedserve_store import (
    DeltaLine,
    ModelStore,
    StoreError,
    TableSpec,
    compact_deltas,
    publish,
    set_alias,
    undo_deltas,
)

UNDO_EVERY_S = 20.0
UNDONE_MAX = 100
"""Most deltas that are undone at once. Some of these undos go past the memory for undos."""
COMPACT_EVERY_S = 300.0
ALIAS_EVERY_S = 7.0
BACK_MAX = 150
"""Deltas that an alias goes back by, at most. Some of them are past the memory for undos."""
SAMPLE_EVERY_S = 0.5
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


@dataclass(frozen=True)
class SoakOptions:
    """Options of a run.

    Attributes:
        devices: as of embedserve serve.
        has_ids: whether deltas add and remove ids.
        has_alias: whether an alias of the version is served, too, and moved.
    """

    rows_per_minute: int
    seed: int
    devices: str
    has_ids: bool
    has_alias: bool


class DeltaSoak:
    """A server, a trainer and callers, and what happens to them."""

    def __init__(self, folder: Path, options: SoakOptions) -> None:
        self.report = Report()
        self._store = folder / "store"
        self._options = options
        self._random = Random(options.seed)
        self._rows_per_push = round(options.rows_per_minute * PUSH_EVERY_S / 60)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["soak.delta_clients", "torch"])
        self._http, grpc = free_port(), free_port()
        self._names = [NAME, ALIAS_NAME] if options.has_alias else [NAME]
        self._publish()
        if options.has_alias:
            set_alias(self._store, MODEL, ALIAS, 1)
        self._server = self._start_server(folder, grpc)
        self._await(lambda: self._models() is not None)
        self._trainer = self._start_trainer()
        self._pipe, theirs = self._context.Pipe()
        where = f"http://127.0.0.1:{self._http}", f"127.0.0.1:{grpc}"
        arguments = (*where, self._names, options.has_ids, theirs)
        self._callers = self._context.Process(target=call, args=arguments)
        self._callers.start()

    def _publish(self) -> None:
        weights = {
            f"ebc.embedding_bags.t{table}.weight": torch.zeros(ROWS, DIM) for table in range(TABLES)
        }
        tables = [
            TableSpec(f"t{table}", ROWS, DIM, (f"f{table}",), "sum", "float32")
            for table in range(TABLES)
        ]
        vocabularies: dict[str, Any] = {}
        if self._options.has_ids:
            weights |= delta_ids.weights()
            tables += delta_ids.tables()
            vocabularies = delta_ids.vocabularies()
        publish(weights, self._store, model=MODEL, tables=tables, vocabularies=vocabularies)

    def _start_server(self, folder: Path, grpc: int) -> subprocess.Popen[bytes]:
        devices = self._options.devices
        workers = 1 if devices == "cuda" else WORKERS
        options = ("--deltas", "follow", "--workers", workers, "--delta-memory", MEMORY)
        ports = ("--http-port", self._http, "--grpc-port", grpc)
        # Versions that are compacted meanwhile are not for this server.
        names = [part for name in self._names for part in ("--model", name)]
        follow = ("--follow", "alias", "--follow-s", 0.2) if self._options.has_alias else ()
        arguments = ("serve", self._store, *names, "--devices", devices, *ports, *options, *follow)
        with (folder / "server.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-c", SERVE, *map(str, arguments)], stdout=log, stderr=log
            )

    def run(self, minutes: float, kills: int) -> None:
        start_s = time.monotonic()
        end_s = start_s + 60 * minutes
        kill_every_s = 60 * minutes / kills if kills else float("inf")
        kill_s, undo_s = start_s + kill_every_s, start_s + UNDO_EVERY_S
        compact_s, calm_s = start_s + COMPACT_EVERY_S, start_s + CALM_S
        undone_s = start_s  # until which lags are those of an undo past the memory
        alias_s = start_s + ALIAS_EVERY_S if self._options.has_alias else float("inf")
        while (now := time.monotonic()) < end_s:
            if now >= kill_s:
                self._kill()
                kill_s, calm_s = kill_s + kill_every_s, now + CALM_S
            if now >= undo_s:
                if self._undo() > UNDO:
                    undone_s = now + CALM_S
                undo_s += UNDO_EVERY_S
            if now >= compact_s:
                self._compact()
                compact_s += COMPACT_EVERY_S
            if now >= alias_s:
                self._move_alias()
                alias_s += ALIAS_EVERY_S
            if (lag_s := self._sample()) is not None and now >= calm_s:
                lags = self.report.lags_s if now >= undone_s else self.report.undo_lags_s
                lags.append(lag_s)
            time.sleep(min(SAMPLE_EVERY_S, max(0.0, kill_s - time.monotonic())))
        self._finish()

    def close(self) -> None:
        for process in (self._trainer, self._callers):
            process.kill()
            process.join()
        self._server.terminate()
        self._server.wait(60)

    def _start_trainer(self) -> BaseProcess:
        arguments = (str(self._store), self._rows_per_push, self._options.has_ids)
        process = self._context.Process(target=train, args=arguments)
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

    def _undo(self) -> int:
        """Undoes some deltas, and returns their number; 0 if there is no undo."""
        last = self._line().seqs()[-1]
        count = min(self._random.randint(1, UNDONE_MAX), last)
        try:
            undo_deltas(self._store, MODEL, to=last - count, why="soak", version=1)
        except StoreError:
            return 0
        self.report.counts["undos"] += 1
        return count

    def _move_alias(self) -> None:
        """Moves the alias to a delta, later or earlier than where it is, or lets it follow all."""
        last = self._line().seqs()[-1]
        back = self._random.choice((None, 0, 3, BACK_MAX))
        at_seq = None if back is None else max(0, last - self._random.randint(0, back))
        set_alias(self._store, MODEL, ALIAS, 1, at_seq=at_seq)
        self.report.counts["moves of the alias"] += 1

    def _compact(self) -> None:
        made = compact_deltas(self._store, MODEL, version=1)
        seq = made.manifest.source["line_seq"]
        version = ModelStore(self._store).load(MODEL, made.version)
        for table, expected in enumerate(self._state(seq)):
            rows = version.tables.rows(f"t{table}").view(np.float32)[:, 0]
            if not np.array_equal(rows, expected):
                self.report.wrong.append(f"compacted {seq}: table t{table} differs")
        if self._options.has_ids:
            found = delta_ids.differences(version, delta_ids.slots_after(self._line(), seq))
            self.report.wrong += [f"compacted {seq}: ids of table {one} differ" for one in found]
        self.report.counts["compactions"] += 1

    def _line(self) -> DeltaLine:
        models = ModelStore(self._store)
        return DeltaLine(models, models.manifest(MODEL, 1))

    def _state(self, seq: int) -> list[NDArray[np.float32]]:
        """Returns the value of each row after delta ``seq``."""
        tables = [np.zeros(ROWS, np.float32) for _ in range(TABLES)]
        for kept in [delta.seq for delta in self._line().deltas_in_state(seq)][::-1]:
            for table, values in enumerate(tables):
                values[changed_rows(kept, table, self._rows_per_push // TABLES)] = kept
        return tables

    def _models(self, name: str = NAME) -> dict[str, Any] | None:
        """Returns what the server shows of the deltas of a served name; None without a response."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._http}/models", timeout=10
            ) as said:
                models = json.load(said)["models"]
            found: dict[str, Any] = models[self._names.index(name)]["deltas"]
        except (OSError, LookupError, ValueError):
            return None
        return found

    def _settle(self, name: str, seq: int) -> None:
        """Waits until a served name is at delta ``seq``."""
        self._await(lambda: (now := self._models(name)) is not None and now["seq"] == seq)

    def _sample(self) -> float | None:
        """Notes the memory, and returns the lag in seconds; None without a response."""
        if (now := self._models()) is None:
            return None
        self.report.memory.append(now["memory_bytes"])
        private = 0
        for pid in children(self._server.pid):
            with suppress(OSError):
                private += memory_bytes(pid)["Anonymous"]
        self.report.supervised.append(private)
        lag_s: float = now["lag_s"]
        return lag_s

    def _finish(self) -> None:
        """Ends the trainer and the callers, and compares all rows with those of the last seq."""
        self._trainer.kill()
        self._trainer.join()
        last = self._line().seqs()[-1]
        self._settle(NAME, last)
        if self._options.has_alias:
            for at_seq in (last // 2, None):
                set_alias(self._store, MODEL, ALIAS, 1, at_seq=at_seq)
                self._settle(ALIAS_NAME, last if at_seq is None else at_seq)
        self._pipe.send("stop")
        wrong, found, counts = self._pipe.recv()
        self.report.wrong += wrong
        self.report.counts += counts
        self.report.counts["deltas"] = last
        self._compare(found)
        self._compare_all_rows(last)

    def _compare(self, found: Found) -> None:
        """Compares what responses had with the deltas that are kept at their seqs."""
        line, wrong = self._line(), self.report.wrong
        for seq, values in found.values.items():
            first = next(line.deltas_in_state(seq), None)
            newest = float(first.seq if first else 0)
            if values != {newest}:
                wrong.append(f"seq {seq}: {values}, expected {newest}")
        for seq, slots in found.slots.items():
            expected = delta_ids.slots_after(line, seq)
            for slot, delta in sorted(slots):
                if delta != expected.get(slot, -1):
                    wrong.append(f"seq {seq}: slot {slot} has the ids of {delta}, of {expected}")
        self.report.counts["seqs that callers saw"] = len(found.values)
        if self._options.has_ids:
            self.report.counts["slots of ids compared"] = sum(map(len, found.slots.values()))

    def _compare_all_rows(self, last: int) -> None:
        """Compares some rows of the whole tables, through all names, with those of the last seq."""
        some = slice(0, ROWS, ROWS // 400)
        rows = [[row] for row in range(ROWS)[some]]
        bags = {f"f{table}": rows for table in range(TABLES)}
        with EmbedClient(f"http://127.0.0.1:{self._http}") as client:
            results = {name: client.embed(bags, model=name) for name in self._names}
        for table, expected in enumerate(self._state(last)):
            for name, result in results.items():
                if not np.array_equal(result.values[:, table * DIM], expected[some]):
                    self.report.wrong.append(f"{name}: at the end table t{table} differs")

    def _await(self, is_true: Callable[[], bool]) -> None:
        end_s = time.monotonic() + SETTLED_S_MAX
        while not is_true():
            if time.monotonic() > end_s or self._server.poll() is not None:
                raise AssertionError(f"the server does not settle: {self._models()}")
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--rows-per-minute", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--devices", default="cpu", help="as of embedserve serve")
    parser.add_argument("--ids", action="store_true", help="deltas add and remove ids, too")
    parser.add_argument("--alias", action="store_true", help="serve and move an alias, too")
    parser.add_argument("--output", type=Path, help="folder for the store and the log")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-deltas-") as where:
        folder = chosen.output or Path(where)
        folder.mkdir(parents=True, exist_ok=True)
        options = SoakOptions(
            chosen.rows_per_minute, chosen.seed, chosen.devices, chosen.ids, chosen.alias
        )
        with closing(DeltaSoak(folder, options)) as soak:
            soak.run(chosen.minutes, chosen.kills)
    print_report(soak.report)
    sys.exit(1 if soak.report.wrong else 0)


if __name__ == "__main__":
    main()
