"""make swaps: changes the served version repeatedly, under full load.

Publishes several versions of a model with eight tables, serves them with `--follow alias` on one
core, and moves the alias. Every tenth move goes back. With `--canary` another alias has a share and
a shadow, and moves, too. From the other core wrk sends requests as fast as it gets responses, and
compares every response with the versions' known responses. Some callers of REST and gRPC send
requests at a steady pace, compare each response with the rows of the version that it names, and
measure latency. Prints the results, and draws latencies and memory over time. With `--parts` a
router over shards is measured, all on that core. With `--server triton` it measures NVIDIA's Triton
instead (swaps.triton_server).

    make swaps SWAPS="--swaps 100 --workers 2 --output folder"
    make swaps SWAPS="--swaps 100 --parts 2 --replicas 2 --output folder"
    make swaps SWAPS="--swaps 100 --server triton --output folder"
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic
from typing import IO

from load import LOAD_CORE, need, parse_wrk, pinned, quantile
from pictures import Panel, draw
from processes import descendants, memory_bytes
from running import SERVER_CORE
from running_servers import free_port
from swaps.callers import CallResults, ask_grpc, ask_rest
from swaps.embedserve_server import EmbedserveServer
from swaps.server import Request, SwapServer
from swaps.triton_server import TritonServer

SERVERS = {"embedserve": EmbedserveServer, "triton": TritonServer}
ROLLBACK_EVERY = CANARY_EVERY = 10
"""Switches between two rollbacks. The canary moves halfway between."""
WRK_CONNECTIONS = 32
CALLERS = 4
"""Steady callers of each protocol."""
REQUESTS = 64
MEMORY_EVERY = 10
"""Switches between two samples of memory."""
READY_S_MAX = 300.0
BEGIN_S = 2.0
"""Seconds of load before the first measured switch."""
SWITCH_S_MAX = 30.0
CALM_S = 1.0
"""Seconds before the first switch to each version."""
AFTER_S = 0.2
"""Seconds after the next version's first response that still count as part of the switch."""
WRK = """
local body = "%s"
local known = {%s}
wrong = 0
wrk.method, wrk.body = "POST", body
%s
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


@dataclass(frozen=True)
class Switch:
    """A switch: when it was requested, when the version was seen first, and when the switch was
    over."""

    version: int
    at_s: float
    seen_s: float
    end_s: float


def forget(tables: Path) -> None:
    """Drops a version's rows, which no process has mapped, from the page cache."""
    opened = os.open(tables, os.O_RDONLY)
    try:
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(opened)


def memory_mb(pid: int) -> float:
    """Returns the MiB of anonymous memory of a process and all processes below it."""
    total = 0
    for one in descendants(pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            total += memory_bytes(one)["Anonymous"]
    return total / 2**20


class Swaps:
    """Changes the version of a server, and records the switches.

    Attributes:
        memory: (time, MiB of all its processes) between two switches.
        first_waits: latencies of steady callers during the first switch to each version, and
            between these switches, before wrk loads the server.
        load: figures of wrk.
    """

    def __init__(self, folder: Path, server: SwapServer, chosen: argparse.Namespace) -> None:
        self.seen = CallResults()
        self.switches: list[Switch] = []
        self.memory: list[tuple[float, float]] = []
        self.start_s = 0.0
        self.first_waits: tuple[list[float], list[float]] = ([], [])
        self.load: dict[str, float] = {}
        self._folder = folder
        self._server = server
        self._chosen = chosen
        random = Random(chosen.seed)
        self._rest, self._grpc = (
            [Request.of(random, chosen.rows, codec) for _ in range(REQUESTS)]
            for codec in (server.rest, server.grpc)
        )
        self._ports = free_port(), free_port()

    def run(self) -> None:
        for version in self._versions:
            self._server.publish(version)
        environment = {**os.environ, **self._server.environment()}
        with ExitStack() as stack:
            log = stack.enter_context((self._folder / "server.log").open("wb"))
            servers = [
                stack.enter_context(_running(command, log, environment))
                for command in self._server.commands(*self._ports)
            ]
            self._wait_until_ready(servers)
            asyncio.run(self._swap([server.pid for server in servers]))

    @property
    def _versions(self) -> list[int]:
        return [*range(1, self._chosen.versions + 1)]

    def _wait_until_ready(self, servers: Sequence[subprocess.Popen[bytes]]) -> None:
        end_s = monotonic() + READY_S_MAX
        while monotonic() < end_s and all(server.poll() is None for server in servers):
            try:
                with urllib.request.urlopen(self._url(self._server.ready_path)):
                    return
            except OSError:
                continue
        sys.exit((self._folder / "server.log").read_text())

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._ports[0]}{path}"

    async def _swap(self, pids: Sequence[int]) -> None:
        callers = self._start_callers()
        versions = self._versions
        for version in (*versions[1:], versions[0]):  # so that every answer is known to wrk
            await asyncio.sleep(CALM_S)
            await self._move(version)
            await _until(lambda: version in self._rest[0].right.values())  # noqa: B023
        self.first_waits = self.waits()
        wrk = await self._start_wrk()
        await asyncio.sleep(BEGIN_S)
        self.seen.waits.clear()
        self.switches.clear()
        self.start_s = monotonic()
        now = versions[0]
        before = versions[-1]
        for number in range(1, self._chosen.swaps + 1):
            await asyncio.sleep(self._chosen.every_s)
            if number % MEMORY_EVERY == 1:
                await self._note_memory(pids)
            is_rollback = number % ROLLBACK_EVERY == 0
            following = versions[(versions.index(now) + 1) % len(versions)]
            before, now = now, before if is_rollback else following
            await self._move(now)
            if number % CANARY_EVERY == CANARY_EVERY // 2:
                canary = versions[number % len(versions)]
                await asyncio.to_thread(self._server.move_canary, canary)
            for task in callers:
                if task.done():
                    task.result()
        await asyncio.sleep(self._chosen.every_s)
        await self._note_memory(pids)
        wrk.send_signal(signal.SIGINT)  # at which it says what it counted
        output, _ = await wrk.communicate()
        self.load = parse_wrk(output.decode())
        for task in callers:
            task.cancel()

    def waits(self) -> tuple[list[float], list[float]]:
        """Returns the latencies of steady callers in seconds: of requests during switches, and of
        all others."""
        during: list[float] = []
        calm: list[float] = []
        for at_s, wait_s in self.seen.waits:
            is_during = any(one.at_s <= at_s <= one.end_s for one in self.switches)
            (during if is_during else calm).append(wait_s)
        return during, calm

    def _start_callers(self) -> list[asyncio.Task[None]]:
        targets = self._server.targets
        protocols = zip((ask_rest, ask_grpc), self._ports, (self._rest, self._grpc), strict=True)
        return [
            asyncio.create_task(
                ask(
                    port,
                    self._server.method,
                    requests,
                    self.seen,
                    Random(f"{ask.__name__} {caller}"),
                    targets[caller % len(targets)],
                )
            )
            for ask, port, requests in protocols
            for caller in range(CALLERS)
        ]

    async def _note_memory(self, pids: Sequence[int]) -> None:
        """Samples the memory in a thread, because the kernel takes long to add it up."""
        total = await asyncio.to_thread(lambda: sum(map(memory_mb, pids)))
        self.memory.append((monotonic(), total))

    async def _move(self, version: int) -> None:
        """Switches to a version, and returns once it was seen."""
        self.seen.first_s.pop(version, None)
        if self._chosen.cold:
            await asyncio.to_thread(forget, self._server.tables(version))
        at_s = monotonic()
        async with asyncio.timeout(SWITCH_S_MAX):
            await self._server.move(version)
        await _until(lambda: version in self.seen.first_s)
        await asyncio.sleep(AFTER_S)
        self.switches.append(Switch(version, at_s, self.seen.first_s[version], monotonic()))

    async def _start_wrk(self) -> asyncio.subprocess.Process:
        def quoted(data: bytes) -> str:
            return "".join(f"\\{byte:03d}" for byte in data)

        first = self._rest[0]
        known = ",".join(f'["{quoted(body)}"]=true' for body in first.right)
        headers = "\n".join(
            f'wrk.headers["{name}"] = "{value}"'
            for name, value in first.codec.headers(first.message).items()
        )
        script = self._folder / "wrk.lua"
        script.write_text(WRK % (quoted(first.message), known, headers))
        seconds = int(self._chosen.swaps * (self._chosen.every_s + SWITCH_S_MAX) + 60)
        url = self._url(self._server.targets[-1].path)
        asked = ["wrk", "-t1", f"-c{WRK_CONNECTIONS}", f"-d{seconds}s", "-s", str(script), url]
        return await asyncio.create_subprocess_exec(
            *pinned(LOAD_CORE, asked), stdout=asyncio.subprocess.PIPE
        )


@contextmanager
def _running(
    command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server on its core, and stops it at the end."""
    pinned_command = pinned(SERVER_CORE, command)
    server = subprocess.Popen(pinned_command, stdout=log, stderr=log, env=environment)
    try:
        yield server
    finally:
        server.terminate()
        server.wait(timeout=60)


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(SWITCH_S_MAX):
        while not is_so():  # noqa: ASYNC110  what is waited for knows no event
            await asyncio.sleep(0.005)


def milliseconds(waits: Sequence[float]) -> str:
    """Formats p50, p99 and the maximum."""
    marks = [quantile(waits, share) for share in (0.5, 0.99, 1.0)]
    return "p50 {:.1f}, p99 {:.1f}, longest {:.1f} ms".format(*(1e3 * mark for mark in marks))


def print_report(swaps: Swaps) -> None:
    switches, seen = swaps.switches, swaps.seen
    during, calm = swaps.waits()
    took = [one.seen_s - one.at_s for one in switches]
    load = swaps.load
    print(f"{len(switches)} switches, each seen {median(took):.2f} s after it was asked for "
          f"(longest {max(took):.2f} s)")  # fmt: skip
    rate = load["requests"] / load["seconds"]
    print(f"full load: {load['requests']:,.0f} requests, {rate:,.0f} a second, "
          f"{load['wrong']:.0f} wrong, {load['errors']:.0f} failed")  # fmt: skip
    print(f"steady callers: {seen.answers.total():,} answers of {len(seen.answers)} versions, "
          f"{len(seen.wrong)} wrong or failed")  # fmt: skip
    print(f"  calm:     {len(calm):,} waits, {milliseconds(calm)}")
    print(f"  switches: {len(during):,} waits, {milliseconds(during)}")
    during, calm = swaps.first_waits
    print("steady callers alone, before wrk, while each version answered for the first time:")
    print(f"  calm:     {len(calm):,} waits, {milliseconds(calm)}")
    print(f"  switches: {len(during):,} waits, {milliseconds(during)}")
    early, last = swaps.memory[min(1, len(swaps.memory) - 1)][1], swaps.memory[-1][1]
    print(f"anonymous memory after the tenth switch {early:.1f} MB, at last {last:.1f} MB")
    for one in seen.wrong[:20]:
        print("  ", one)


def draw_report(swaps: Swaps, path: Path) -> None:
    start_s = swaps.start_s
    count = int(max(at_s for at_s, _ in swaps.seen.waits) - start_s) + 1
    waits: list[list[float]] = [[] for _ in range(count)]
    for at_s, wait in swaps.seen.waits:
        waits[max(0, int(at_s - start_s))].append(1e3 * wait)
    nan = float("nan")
    p99s = [quantile(one, 0.99) if one else nan for one in waits]
    memory = [nan] * count
    for at_s, value in swaps.memory:
        memory[min(count - 1, int(at_s - start_s))] = value
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
    parser.add_argument("--server", choices=SERVERS, default="embedserve")
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--every-s", type=float, default=2.0, help="between two of them")
    parser.add_argument("--workers", type=int, default=2, help="of embedserve, or of its router")
    parser.add_argument(
        "--parts", type=int, default=0, help="divide the tables over shards; embedserve"
    )
    parser.add_argument("--replicas", type=int, default=2, help="shards of each part")
    parser.add_argument("--row-cache", type=int, default=0, help="bytes, of the router of parts")
    parser.add_argument("--versions", type=int, default=3, help="that take turns")
    parser.add_argument("--rows", type=int, default=100_000, help="of each of the eight tables")
    parser.add_argument(
        "--canary", type=float, default=0.0, help="its share, in percent; embedserve"
    )
    parser.add_argument("--shadow", type=float, default=0.0, help="of the canary, in percent")
    parser.add_argument(
        "--layouts", action="store_true", help="a version has another sharding than that before it"
    )
    parser.add_argument("--cold", action="store_true", help="the next version is on the disk alone")
    parser.add_argument("--store", type=Path, help="folder whose versions are used, and stay")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--output", type=Path, help="folder for the log and the picture")
    chosen = parser.parse_args()
    need("wrk")
    folder = chosen.output or Path(tempfile.mkdtemp(prefix="swaps-"))
    folder.mkdir(parents=True, exist_ok=True)
    if chosen.store:
        chosen.store.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, {int(LOAD_CORE)})
    with tempfile.TemporaryDirectory(prefix="swaps-") as where:
        swaps = Swaps(folder, SERVERS[chosen.server](chosen.store or Path(where), chosen), chosen)
        swaps.run()
    print_report(swaps)
    draw_report(swaps, folder / "swaps.png")
    sys.exit(1 if swaps.seen.wrong or swaps.load["wrong"] or swaps.load["errors"] else 0)


if __name__ == "__main__":
    main()
