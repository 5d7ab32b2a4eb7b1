"""make fuzz: sends malformed requests to a server, and checks that other clients are not affected.

Valid requests are mixed in, and their responses must be exact. A neighbour on its own connections
must get its responses in time. No request may fail inside the server, and its memory must come
back. Damaged store files must be rejected. Prints a table, and draws latency and memory.

    make fuzz FUZZ="--minutes 30 --seed 7 --output folder"
"""

from __future__ import annotations

import re
import select
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from fuzz.corpus import Kind, kinds
from fuzz.mutate import mutated
from fuzz.store_files import fuzz_store, publish
from hostile.canary_client import Neighbour, anonymous_kib
from hostile.conftest import Victim, running_victim
from hostile.target_server import table
from long_runs import chosen
from pictures import Panel, draw

OPEN_MAX = 96
WAIT_S = 0.25
"""Seconds until a malformed request without a response is given up. For most of them the server
waits for more bytes."""
RIGHT_S_MAX = 60.0
RIGHT_EVERY = 16
SAMPLE_S = 2.0
SETTLE_S = 3.0
GROWTH_KIB_MAX = 64 << 10
NEIGHBOUR_S_MAX = 2.0
"""Seconds until the neighbour's response, at most. It is a bound, not a speed, because both cores
may be busy."""
RIGHT_FAILURES = {501: b"transfer-encoding", 505: b"http/", 504: b"x-timeout-ms"}
"""Statuses of 500 and above that are correct, each with the bytes of the requests that get it, in
lower case. Such a request names another transfer coding or version of HTTP, or a timeout that a
busy server exceeds."""
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) |:status\x03(\d{3})")
GRPC_STATUS = re.compile(rb"grpc-status[\1\2](\d{1,2})")
STORE_SHARE = 0.1
"""Fraction of the time that is spent on store files."""
SAID_MAX = 10
SAID_CHARACTERS_MAX = 2000


@dataclass
class Attempt:
    """An input that was sent, with its response so far."""

    sock: socket.socket
    kind: Kind
    data: bytes
    is_right: bool
    end_s: float
    received: bytearray = field(default_factory=bytearray)


@dataclass
class Sample:
    """Slowest response of the neighbour, and the server's memory, in one interval."""

    at_s: float
    slowest_ms: float
    memory_mb: float


@dataclass
class Report:
    """Inputs that were sent, and their outcomes.

    Attributes:
        sent: inputs by kind.
        right: valid inputs by kind.
        outcomes: statuses of responses, by kind.
        wrong: failures.
    """

    sent: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    outcomes: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    wrong: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    grown_kib: int = 0

    @property
    def malformed(self) -> int:
        return self.sent.total() - self.right.total()


class Fuzzer:
    """Keeps several connections busy with inputs of all kinds."""

    def __init__(self, victim: Victim, neighbour: Neighbour, seed: int) -> None:
        self.report = Report()
        self._victim = victim
        self._neighbour = neighbour
        self._random = Random(seed)
        self._kinds = kinds(table())
        self._open: dict[int, Attempt] = {}
        self._poll = select.epoll()
        self._count = 0

    def run(self, end_s: float, inputs_max: int) -> None:
        """Runs until monotonic ``end_s``, or until ``inputs_max`` inputs were sent."""
        start_s = time.monotonic()
        before_kib = anonymous_kib(self._victim.pid)
        self._neighbour.begin()
        sampled_s = start_s
        while time.monotonic() < end_s and self._count < inputs_max:
            while len(self._open) < OPEN_MAX:
                self._send()
            self._read()
            if time.monotonic() - sampled_s > SAMPLE_S:
                self._sample(start_s)
                self._neighbour.begin()
                sampled_s = time.monotonic()
        while self._open:
            self._read()
        self._sample(start_s)
        time.sleep(SETTLE_S)
        self.report.grown_kib = anonymous_kib(self._victim.pid) - before_kib
        if self.report.grown_kib > GROWTH_KIB_MAX:
            self._wrong(f"the server kept {self.report.grown_kib} KiB")
        log = self._victim.log.read_text(errors="replace")
        if "Traceback" in log or "a request failed" in log:
            self._wrong(f"the server's log: …{log[-2000:]}")

    def _send(self) -> None:
        kind = self._random.choice(self._kinds)
        seed = self._random.choice(kind.seeds)
        self._count += 1
        is_right = self._count % RIGHT_EVERY == 0
        data = kind.wrap(seed if is_right else mutated(self._random, seed, kind.seeds))
        port = self._victim.grpc_port if kind.is_grpc_port else self._victim.http_port
        sock = socket.create_connection(("127.0.0.1", port), timeout=RIGHT_S_MAX)
        wait_s = RIGHT_S_MAX if is_right else WAIT_S
        attempt = Attempt(sock, kind, data, is_right, time.monotonic() + wait_s)
        self.report.sent[kind.name] += 1
        self.report.right[kind.name] += is_right
        self._open[sock.fileno()] = attempt
        self._poll.register(sock, select.EPOLLIN)
        with suppress(OSError):  # the server has closed it: what it said comes next
            sock.sendall(data)
        sock.setblocking(False)

    def _read(self) -> None:
        for file, _ in self._poll.poll(0.01):
            attempt = self._open[file]
            try:
                data = attempt.sock.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            attempt.received += data
            if not data or (attempt.is_right and attempt.kind.expected in attempt.received):
                self._end(attempt)
        now_s = time.monotonic()
        for attempt in [one for one in self._open.values() if one.end_s < now_s]:
            self._end(attempt)

    def _end(self, attempt: Attempt) -> None:
        self._poll.unregister(attempt.sock)
        del self._open[attempt.sock.fileno()]
        attempt.sock.close()
        statuses = [int(a or b) for a, b in STATUS.findall(attempt.received)]
        outcomes = self.report.outcomes[attempt.kind.name]
        of_grpc = [f"grpc {code.decode()}" for code in GRPC_STATUS.findall(attempt.received)]
        outcomes.update(of_grpc or map(str, statuses) if statuses else ["no answer"])
        asked = attempt.data.lower()
        failed = [
            one
            for one in statuses
            if one >= 500 and not (one in RIGHT_FAILURES and RIGHT_FAILURES[one] in asked)
        ]
        if failed:
            self._wrong(f"{attempt.kind.name}: {failed} to {attempt.data!r}")
        if attempt.is_right and attempt.kind.expected not in attempt.received:
            self._wrong(f"{attempt.kind.name}: {bytes(attempt.received)!r} to {attempt.data!r}")

    def _sample(self, start_s: float) -> None:
        seen = self._neighbour.seen()
        at_s = time.monotonic() - start_s
        sample = Sample(at_s, seen.slowest_s * 1e3, seen.anonymous_kib_max / 1024)
        self.report.samples.append(sample)
        for failure in seen.failures:
            self._wrong(f"the neighbour: {failure}")
        if seen.slowest_s > NEIGHBOUR_S_MAX:
            self._wrong(f"the neighbour waited {seen.slowest_s:.1f} s")

    def _wrong(self, what: str) -> None:
        if what not in self.report.wrong:
            self.report.wrong.append(what)


def fuzz(folder: Path, *, seconds: float, inputs_max: int = sys.maxsize, seed: int) -> Report:
    """Fuzzes a server of its own and returns the report. The server's log is kept in ``folder``."""
    with (
        running_victim(folder / "server.log", "defaults") as victim,
        Neighbour(victim.http_port, victim.grpc_port, victim.pid, table()) as neighbour,
    ):
        fuzzer = Fuzzer(victim, neighbour, seed)
        fuzzer.run(time.monotonic() + seconds, inputs_max)
    return fuzzer.report


def print_table(report: Report) -> None:
    print(f"{'inputs':22} {'sent':>9} {'right':>7}  answers")
    for name, sent in sorted(report.sent.items()):
        outcomes = sorted(report.outcomes[name].items())
        answers = ", ".join(f"{count} {status}" for status, count in outcomes)
        print(f"{name:22} {sent:>9,} {report.right[name]:>7,}  {answers}")
    slowest = [sample.slowest_ms for sample in report.samples]
    memory = [sample.memory_mb for sample in report.samples]
    print(f"malformed inputs: {report.malformed:,}")
    print(f"neighbour's slowest answer: {max(slowest):.1f} ms (in {SAMPLE_S:g} s of the median "
          f"{sorted(slowest)[len(slowest) // 2]:.1f})")  # fmt: skip
    print(f"server's memory: {memory[0]:.0f} MB at first, {max(memory):.0f} at most, "
          f"{report.grown_kib / 1024:+.1f} MB in the end")  # fmt: skip
    print(f"wrong: {len(report.wrong)}")
    for one in report.wrong[:SAID_MAX]:
        print("  ", one[:SAID_CHARACTERS_MAX])


def draw_samples(samples: Sequence[Sample], path: Path) -> None:
    panels = [
        Panel("neighbour's slowest, ms", {"": [sample.slowest_ms for sample in samples]}),
        Panel("server's memory, MB", {"": [sample.memory_mb for sample in samples]}),
    ]
    draw(path, [sample.at_s for sample in samples], panels)


def main() -> None:
    run = chosen("fuzz", "Sends wrong requests to a server of its own.", minutes=5.0)
    seconds = 60 * run.minutes
    store = publish(run.folder)
    end_s = time.monotonic() + STORE_SHARE * seconds
    changed = fuzz_store(store, end_s, sys.maxsize, Random(run.seed))
    print("files of a store, changed and refused:")
    for name, count in sorted(changed.items()):
        print(f"    {name:24} {count:>7,}")
    report = fuzz(run.folder, seconds=(1 - STORE_SHARE) * seconds, seed=run.seed)
    print_table(report)
    draw_samples(report.samples, run.folder / "fuzz.png")
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
