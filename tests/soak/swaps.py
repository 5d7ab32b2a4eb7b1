"""make swaps: changes the version that answers, again and again, under full load.

Publishes some versions of a model of eight tables, serves them with `--follow alias` on one core,
and moves the alias; each tenth time back to where it was. With `--canary` another alias has a share
and is in the shadow, and moves, too. wrk asks as fast as it is answered, from the other core, and
compares every answer with those that the versions give to its request; beside it some callers of
REST and gRPC ask requests of their own at a steady pace, compare each answer with the rows of the
version that it names, and note how long it took. Prints what came of it, and draws waits and memory
over time.

    make swaps SWAPS="--swaps 100 --workers 2 --output folder"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic

import grpc
import numpy as np
from pictures import Panel, draw
from running_servers import command, free_port
from safetensors.numpy import save_file

from embedserve_proto import embedding_pb2 as pb
from embedserve_store import ModelStore, set_alias

SERVER_CORE, LOAD_CORE = 0, 1
MODEL, ALIAS, CANARY = "swaps", "stable", "canary"
ROLLBACK_EVERY = CANARY_EVERY = 10
"""Switches; the canary moves between two rollbacks."""
TABLES, DIM, BAG_MAX = 8, 64, 8
FIGURE = 4099
"""Values of a version are below, and added to its number of STEPs: sums of them are exact."""
STEP = 5000
WRK_CONNECTIONS = 32
CALLERS, RATE = 4, 50.0
"""Of each protocol, and of each caller a second."""
REQUESTS = 64
MEMORY_EVERY = 10
"""Switches."""
READY_S_MAX = 300.0
SWITCH_S_MAX = 120.0
AFTER_S = 0.2
"""Past the first answer of the next version, in which a wait counts as one of the switch."""
HEAD = (
    b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Type: application/x-protobuf\r\n"
    b"Accept: application/x-protobuf\r\nContent-Length: %d\r\n\r\n%b"
)
WRK = """
local body = "%s"
local known = {%s}
wrong = 0
wrk.method, wrk.body = "POST", body
wrk.headers["Content-Type"] = "application/x-protobuf"
wrk.headers["Accept"] = "application/x-protobuf"
local threads = {}
function setup(thread) table.insert(threads, thread) end
function response(status, headers, body)
  if status ~= 200 or not known[body] then wrong = wrong + 1 end
end
function done(summary)
  local all = 0
  for _, thread in ipairs(threads) do all = all + thread:get("wrong") end
  local failed = summary.errors.connect + summary.errors.read + summary.errors.write
  io.write(string.format(
    'FIGURES {"requests": %%d, "seconds": %%f, "wrong": %%d, "errors": %%d}\\n',
    summary.requests, summary.duration / 1e6, all, failed + summary.errors.timeout))
end
"""


def pinned(core: int, arguments: Sequence[object]) -> list[str]:
    return ["taskset", "-c", str(core), *map(str, arguments)]


def row_values(version: int, table: int, rows: np.ndarray) -> np.ndarray:
    """float32 [rows, DIM]: the rows of a table of a version."""
    columns = np.arange(DIM)[None, :]
    whole = (rows[:, None] * 7 + columns * 3 + table * 11) % FIGURE + STEP * version
    return whole.astype(np.float32)


@dataclass
class Request:
    """Ids of each table's feature, and what answers it exactly.

    Attributes:
        message: as protobuf.
        right: answers that were compared, with their versions.
    """

    ids: list[np.ndarray]
    message: bytes
    right: dict[bytes, int] = field(default_factory=dict)

    @classmethod
    def of(cls, random: Random, rows: int) -> Request:
        ids = [
            np.array([random.randrange(rows) for _ in range(random.randint(0, BAG_MAX))], np.int64)
            for _ in range(TABLES)
        ]
        message = pb.EmbedRequest(
            keys=[f"f{table}" for table in range(TABLES)],
            ids=np.concatenate(ids).tolist(),
            lengths=[one.size for one in ids],
        )
        return cls(ids, message.SerializeToString())

    def version_of(self, body: bytes) -> int | None:
        """Of an answer; None if it is not right for the version that it names."""
        if (known := self.right.get(body)) is not None:
            return known
        answer = pb.EmbedResponse.FromString(body)
        expected = [
            row_values(answer.version, table, ids).sum(0, dtype=np.float32)
            for table, ids in enumerate(self.ids)
        ]
        if not np.array_equal(np.frombuffer(answer.values, "<f4"), np.concatenate(expected)):
            return None
        self.right[body] = answer.version
        return int(answer.version)


@dataclass
class Seen:
    """What the steady callers saw.

    Attributes:
        waits: (when asked, seconds) of each answer.
        answers: by version.
        first_s: when a version answered first since it was awaited.
    """

    waits: list[tuple[float, float]] = field(default_factory=list)
    answers: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    first_s: dict[int, float] = field(default_factory=dict)

    def note(self, asked_s: float, request: Request, body: bytes, name: str) -> None:
        """Of a request that named the model so."""
        now_s = monotonic()
        version = request.version_of(body)
        if version is None:
            self.wrong.append(f"a wrong answer: {body[:80]!r}")
            return
        self.waits.append((asked_s, now_s - asked_s))
        self.answers[version] += 1
        if name:
            self.first_s.setdefault(version, now_s)


@dataclass(frozen=True)
class Switch:
    """One: when the alias was moved, and when the version was seen first; and memory, of some."""

    version: int
    at_s: float
    seen_s: float
    memory_mb: float


async def ask_rest(
    port: int, requests: Sequence[Request], seen: Seen, random: Random, name: str
) -> None:
    path = f"/models/{name}/embed" if name else "/embed"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        request = random.choice(requests)
        asked_s = monotonic()
        writer.write(HEAD % (path.encode(), len(request.message), request.message))
        head = await reader.readuntil(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        body = await reader.readexactly(int(found[1]) if found else 0)
        if head.startswith(b"HTTP/1.1 200"):
            seen.note(asked_s, request, body, name)
        else:
            seen.wrong.append(f"REST: {head[:40]!r} {body[:200]!r}")
        await asyncio.sleep(random.uniform(0.5, 1.5) / RATE)


async def ask_grpc(
    port: int, requests: Sequence[Request], seen: Seen, random: Random, name: str
) -> None:
    model = pb.EmbedRequest(model=name).SerializeToString()
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        embed = channel.unary_unary("/embedserve.v1.EmbeddingService/Embed")
        while True:
            request = random.choice(requests)
            asked_s = monotonic()
            try:
                body = await embed(model + request.message)
                seen.note(asked_s, request, body, name)
            except grpc.aio.AioRpcError as error:
                seen.wrong.append(f"gRPC: {error.code().name} {error.details()}")
            await asyncio.sleep(random.uniform(0.5, 1.5) / RATE)


def publish(store: Path, version: int, rows: int) -> None:
    """As a child, so that this process does not import torch."""
    weights = {
        f"embedding_bags.t{table}.weight": row_values(version, table, np.arange(rows))
        for table in range(TABLES)
    }
    checkpoint, tables = store.parent / "model.safetensors", store.parent / "tables.yaml"
    save_file(weights, checkpoint)
    described = [
        {
            "name": f"t{table}",
            "num_embeddings": rows,
            "embedding_dim": DIM,
            "feature_names": [f"f{table}"],
            "pooling": "sum",
        }
        for table in range(TABLES)
    ]
    tables.write_text(json.dumps({"tables": described}))
    options = ["--model", MODEL, "--world-size", "1", "--sharding", "table_wise"]
    subprocess.run(
        command("publish", checkpoint, tables, store, *options), check=True, capture_output=True
    )
    checkpoint.unlink()


def forget(folder: Path) -> None:
    """Drops a version's tables, which nobody has mapped, from the page cache."""
    tables = os.open(folder / "tables.safetensors", os.O_RDONLY)
    try:
        os.posix_fadvise(tables, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(tables)


def memory_mb(pid: int) -> float:
    """Anonymous memory of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    total = 0
    for one in (str(pid), *children):
        for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                total += int(line.split()[1])
    return total / 1024


class Swaps:
    """A server that follows an alias, and what was seen of its switches."""

    def __init__(self, folder: Path, store: Path, chosen: argparse.Namespace) -> None:
        self.seen = Seen()
        self.switches: list[Switch] = []
        self.start_s = 0.0
        self.load: dict[str, float] = {}
        self._folder = folder
        self._store = store
        self._chosen = chosen
        self._random = Random(chosen.seed)
        self._requests = [Request.of(self._random, chosen.rows) for _ in range(REQUESTS)]
        self._ports = free_port(), free_port()

    def run(self) -> None:
        http_port, grpc_port = self._ports
        serve = [
            *command("serve", self._store, "--model", f"{MODEL}@{ALIAS}", "--follow", "alias"),
            *("--default-model", MODEL),
            *("--follow-s", 0.1, "--workers", self._chosen.workers),
            *("--http-port", http_port, "--grpc-port", grpc_port),
        ]
        set_alias(self._store, MODEL, ALIAS, 1)
        if self._chosen.canary:
            serve += ["--model", f"{MODEL}@{CANARY}"]
            self._move_canary(2)
        with (self._folder / "server.log").open("wb") as log:
            server = subprocess.Popen(pinned(SERVER_CORE, serve), stdout=log, stderr=log)
            try:
                self._wait_until_ready(server)
                asyncio.run(self._swap(server.pid))
            finally:
                server.terminate()
                server.wait(timeout=60)

    def _wait_until_ready(self, server: subprocess.Popen[bytes]) -> None:
        end_s = monotonic() + READY_S_MAX
        while monotonic() < end_s and server.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._ports[0]}/health/ready"):
                    return
            except OSError:
                continue
        sys.exit((self._folder / "server.log").read_text())

    async def _swap(self, pid: int) -> None:
        asking = [
            asyncio.create_task(
                ask(port, self._requests, self.seen, Random(f"{ask.__name__} {caller}"), name)
            )
            for ask, port in zip((ask_rest, ask_grpc), self._ports, strict=True)
            for caller, name in enumerate((f"{MODEL}@{ALIAS}", "") * (CALLERS // 2))
        ]
        versions = ModelStore(self._store).versions(MODEL)
        for version in (*versions[1:], versions[0]):  # so that every answer is known to wrk
            await self._move(version, pid)
            await _until(lambda: version in self._requests[0].right.values())  # noqa: B023
        wrk = await self._start_wrk()
        self.seen.waits.clear()
        self.switches.clear()
        self.start_s = monotonic()
        now = versions[0]
        before = versions[-1]
        for number in range(1, self._chosen.swaps + 1):
            await asyncio.sleep(self._chosen.every_s)
            is_rollback = number % ROLLBACK_EVERY == 0
            following = versions[(versions.index(now) + 1) % len(versions)]
            before, now = now, before if is_rollback else following
            await self._move(now, pid)
            if self._chosen.canary and number % CANARY_EVERY == CANARY_EVERY // 2:
                self._move_canary(versions[number % len(versions)])
            for task in asking:
                if task.done():
                    task.result()
        await asyncio.sleep(self._chosen.every_s)
        wrk.send_signal(signal.SIGINT)  # at which it says what it counted
        output, _ = await wrk.communicate()
        found = re.search(rb"^FIGURES (.*)$", output, re.MULTILINE)
        if found is None:
            sys.exit(f"wrk printed no figures: {output!r}")
        self.load = json.loads(found[1])
        for task in asking:
            task.cancel()

    async def _move(self, version: int, pid: int) -> None:
        """Returns once the version was seen."""
        self.seen.first_s.pop(version, None)
        if self._chosen.cold:
            forget(self._store / MODEL / str(version))
        at_s = monotonic()
        set_alias(self._store, MODEL, ALIAS, version)
        await _until(lambda: version in self.seen.first_s)
        seen_s = self.seen.first_s[version]
        await asyncio.sleep(AFTER_S)
        memory = float("nan")
        if len(self.switches) % MEMORY_EVERY == MEMORY_EVERY - 1:  # the kernel takes its time
            memory = await asyncio.to_thread(memory_mb, pid)
        self.switches.append(Switch(version, at_s, seen_s, memory))

    def _move_canary(self, version: int) -> None:
        percents = {"share": self._chosen.canary, "shadow": self._chosen.shadow}
        set_alias(self._store, MODEL, CANARY, version, **percents)

    async def _start_wrk(self) -> asyncio.subprocess.Process:
        def quoted(data: bytes) -> str:
            return "".join(f"\\{byte:03d}" for byte in data)

        first = self._requests[0]
        known = ",".join(f'["{quoted(body)}"]=true' for body in first.right)
        script = self._folder / "wrk.lua"
        script.write_text(WRK % (quoted(first.message), known))
        seconds = int(self._chosen.swaps * (self._chosen.every_s + SWITCH_S_MAX) + 60)
        url = f"http://127.0.0.1:{self._ports[0]}/embed"
        asked = ["wrk", "-t1", f"-c{WRK_CONNECTIONS}", f"-d{seconds}s", "-s", script, url]
        return await asyncio.create_subprocess_exec(
            *pinned(LOAD_CORE, asked), stdout=asyncio.subprocess.PIPE
        )


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(SWITCH_S_MAX):
        while not is_so():  # noqa: ASYNC110  what is waited for knows no event
            await asyncio.sleep(0.005)


def milliseconds(waits: Sequence[float]) -> str:
    """p50, p99 and the longest."""
    ordered = sorted(waits)
    marks = (ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))], ordered[-1])
    return "p50 {:.1f}, p99 {:.1f}, longest {:.1f} ms".format(*(1e3 * mark for mark in marks))


def print_report(swaps: Swaps) -> None:
    switches, seen = swaps.switches, swaps.seen
    spans = [(one.at_s, one.seen_s + AFTER_S) for one in switches]
    within = [any(a <= at_s <= b for a, b in spans) for at_s, _ in seen.waits]
    during = [wait for (_, wait), is_in in zip(seen.waits, within, strict=True) if is_in]
    calm = [wait for (_, wait), is_in in zip(seen.waits, within, strict=True) if not is_in]
    took = [one.seen_s - one.at_s for one in switches]
    memory = [one.memory_mb for one in switches if one.memory_mb == one.memory_mb]
    load = swaps.load
    print(f"{len(switches)} switches, each seen {median(took):.2f} s after the alias was moved "
          f"(longest {max(took):.2f} s)")  # fmt: skip
    rate = load["requests"] / load["seconds"]
    print(f"full load: {load['requests']:,.0f} requests, {rate:,.0f} a second, "
          f"{load['wrong']:.0f} wrong, {load['errors']:.0f} failed")  # fmt: skip
    print(f"steady callers: {seen.answers.total():,} answers of {len(seen.answers)} versions, "
          f"{len(seen.wrong)} wrong or failed")  # fmt: skip
    print(f"  calm:     {len(calm):,} waits, {milliseconds(calm)}")
    print(f"  switches: {len(during):,} waits, {milliseconds(during)}")
    if memory:
        print(f"anonymous memory after the tenth switch {memory[0]:.1f} MB, at last "
              f"{memory[-1]:.1f} MB")  # fmt: skip
    for one in seen.wrong[:20]:
        print("  ", one)


def draw_report(swaps: Swaps, path: Path) -> None:
    start_s = swaps.start_s
    count = int(max(at_s for at_s, _ in swaps.seen.waits) - start_s) + 1
    waits: list[list[float]] = [[] for _ in range(count)]
    for at_s, wait in swaps.seen.waits:
        waits[max(0, int(at_s - start_s))].append(1e3 * wait)
    nan = float("nan")
    p99s = [sorted(one)[int(0.99 * len(one))] if one else nan for one in waits]
    memory = [nan] * count
    for one in swaps.switches:
        if one.memory_mb == one.memory_mb:
            memory[min(count - 1, int(one.seen_s - start_s))] = one.memory_mb
    known = nan
    for second, value in enumerate(memory):
        known = memory[second] = known if value != value else value
    slowest = [max(one, default=nan) for one in waits]
    panels = [
        Panel("waits, ms", {"slowest": slowest, "p99": p99s}, is_log=True),
        Panel("anonymous memory, MB", {"all processes": memory}),
    ]
    marks = [(one.at_s - start_s, "switch") for one in swaps.switches]
    draw(path, list(range(count)), panels, marks=marks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--every-s", type=float, default=2.0, help="between two of them")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--versions", type=int, default=3, help="that take turns")
    parser.add_argument("--rows", type=int, default=100_000, help="of each of the eight tables")
    parser.add_argument("--canary", type=float, default=0.0, help="its share, in percent")
    parser.add_argument("--shadow", type=float, default=0.0, help="of the canary, in percent")
    parser.add_argument("--cold", action="store_true", help="the next version is on the disk alone")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--output", type=Path, help="folder for the log and the picture")
    chosen = parser.parse_args()
    for tool in ("wrk", "taskset"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is missing")
    folder = chosen.output or Path(tempfile.mkdtemp(prefix="swaps-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, {LOAD_CORE})
    with tempfile.TemporaryDirectory(prefix="swaps-") as where:
        store = Path(where) / "store"
        for version in range(1, chosen.versions + 1):
            publish(store, version, chosen.rows)
        swaps = Swaps(folder, store, chosen)
        swaps.run()
    print_report(swaps)
    draw_report(swaps, folder / "swaps.png")
    sys.exit(1 if swaps.seen.wrong or swaps.load["wrong"] or swaps.load["errors"] else 0)


if __name__ == "__main__":
    main()
