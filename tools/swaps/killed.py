"""make swaps-killed: kill -9 at every moment of a change of the version.

A server with several workers follows an alias. The alias is moved. A moment later, which differs
each time, a worker or the supervisor is killed. If it was the supervisor, the server is started
again. Every response must be exact for the version that it names, which is the previous or the new
one, until all processes respond with the new version. Prints the counts.

    make swaps-killed SWAPS="--kills 60 --output folder"
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from random import Random
from time import monotonic, sleep

from processes import children
from running_servers import command, free_port
from swaps.embedserve_server import ALIAS, CODEC, LAYOUTS, MODEL, publish
from swaps.server import Request

from embedserve.errors import LOADING
from embedserve_store import set_alias

ROWS = 1000
VERSIONS = 3
WORKERS = 2
SPAN_S = 0.6
"""Seconds after the move of the alias within which a process is killed. A change takes a third of
them."""
SUPERVISOR_EVERY = 10
"""Kills between two kills of the supervisor."""
ASKED = 24
"""Consecutive connections that must all get the new version at the end."""
SETTLED_S_MAX = 120.0
EMBED = {"Content-Type": "application/x-protobuf", "Accept": "application/x-protobuf"}


class Server:
    """`embedserve serve`, which is started again on the same ports if a kill ends it."""

    def __init__(self, store: Path, log: Path) -> None:
        self.port = free_port()
        self._log = log
        self._command = [
            *command("serve", store, "--model", f"{MODEL}@{ALIAS}", "--follow", "alias"),
            *("--follow-s", "0.1", "--workers", str(WORKERS), "--worker-hang-s", "0"),
            *("--http-port", str(self.port), "--grpc-port", str(free_port())),
        ]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log)

    def start_if_gone(self) -> None:
        if self.process.poll() is not None:
            self.process = self._start()

    def workers(self) -> list[int]:
        return children(self.process.pid)

    def ready_workers(self) -> int:
        """Returns the ready workers in /metrics; 0 if the server does not respond."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/metrics", timeout=10
            ) as answer:
                found = re.search(r"^embedserve_workers (\d+)", answer.read().decode(), re.M)
        except (OSError, HTTPException):
            return 0
        return int(found[1]) if found else 0

    def ask(self, message: bytes) -> bytes | None:
        """Returns the response over a new connection. Returns None if the connection broke or
        failed, or if a restarted server still loads its models."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("POST", "/embed", message, EMBED)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, HTTPException):
            return None
        finally:
            connection.close()
        if answer.status == 503 and LOADING.encode() in body:
            return None
        if answer.status != 200:
            raise AssertionError(f"{answer.status}: {body!r}")
        return body

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(timeout=60)


@contextmanager
def serving(store: Path, log: Path) -> Iterator[Server]:
    server = Server(store, log)
    try:
        yield server
    finally:
        server.stop()


class KillRun:
    """Kills processes, and records the outcome.

    Attributes:
        counts: kills by victim, and responses.
        settled_s: seconds from each kill until all responses are of the new version.
        wrong: failures.
    """

    def __init__(self, server: Server, store: Path, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.settled_s: list[float] = []
        self.wrong: list[str] = []
        self._server = server
        self._store = store
        random = Random(seed)
        self._requests = [Request.of(random, ROWS, CODEC) for _ in range(16)]
        self._asked = 0
        self._version = 1

    def kill(self, number: int, delay_s: float) -> None:
        """Moves the alias, kills after ``delay_s``, and waits until the new version serves
        everywhere."""
        before, self._version = self._version, self._version % VERSIONS + 1
        self._settle({before})
        set_alias(self._store, MODEL, ALIAS, self._version)
        end_s = monotonic() + delay_s
        while monotonic() < end_s:
            self._ask({before, self._version})
        is_supervisor = number % SUPERVISOR_EVERY == SUPERVISOR_EVERY - 1
        workers = self._server.workers()
        victim = self._server.process.pid if is_supervisor else workers[number % len(workers)]
        killed_s = monotonic()
        os.kill(victim, signal.SIGKILL)
        self.counts["supervisors killed" if is_supervisor else "workers killed"] += 1
        if is_supervisor:
            self._server.process.wait()
            self._await_end(workers)
        else:  # it counts as ready until the supervisor has seen it
            self._await_end([victim])
        self._settle({before, self._version}, then=self._version)
        self.settled_s.append(monotonic() - killed_s)

    def _await_end(self, workers: list[int]) -> None:
        """Waits until processes have ended: a killed one, or those that lost their supervisor."""
        end_s = monotonic() + SETTLED_S_MAX
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            if monotonic() > end_s:
                self.wrong.append(f"processes {workers} have not ended")
                return
            sleep(0.02)

    def _settle(self, allowed: set[int], then: int | None = None) -> None:
        """Sends requests until all workers are ready, and then until all responses are of version
        ``then``."""
        end_s = monotonic() + SETTLED_S_MAX
        while self._server.ready_workers() < WORKERS:
            self._server.start_if_gone()
            self._ask(allowed)
            if monotonic() > end_s:
                raise AssertionError("not all workers are back")
        while then is not None and {self._ask(allowed) for _ in range(ASKED)} != {then}:
            if monotonic() > end_s:
                raise AssertionError(f"not all answer by version {then}")

    def _ask(self, allowed: set[int]) -> int | None:
        """Sends a request, checks the response, and returns its version; None if there is none."""
        self._asked += 1
        request = self._requests[self._asked % len(self._requests)]
        body = self._server.ask(request.message)
        if body is None:
            self.counts["without an answer"] += 1
            return None
        version = request.version_of(body)
        if version not in allowed:
            self.wrong.append(f"answered by {version}, not one of {allowed}")
        self.counts["answers"] += 1
        return version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--output", type=Path, help="folder for the log")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swaps-killed-") as where:
        folder = chosen.output or Path(where)
        folder.mkdir(parents=True, exist_ok=True)
        store = Path(where) / "store"
        for version in range(1, VERSIONS + 1):
            publish(store, version, ROWS, *LAYOUTS[0])
        set_alias(store, MODEL, ALIAS, 1)
        with serving(store, folder / "server.log") as server:
            killed = KillRun(server, store, chosen.seed)
            for number in range(chosen.kills):
                killed.kill(number, SPAN_S * number / chosen.kills)
    for what, count in sorted(killed.counts.items()):
        print(f"{count:8,} {what}")
    print(f"all answered by the new version {max(killed.settled_s):.1f} s after a kill at most")
    print(f"wrong: {len(killed.wrong)}")
    for one in killed.wrong[:20]:
        print("  ", one)
    sys.exit(1 if killed.wrong else 0)


if __name__ == "__main__":
    main()
