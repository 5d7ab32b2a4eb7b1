"""Isolation of callers: the latency of one caller while another offers ten times its rate limit.

    PYTHONPATH=bench python bench/experiments/noisy_neighbor.py \\
        [--rounds 5] [--seconds 8] [--limit 1000]

The server runs on core 0, both callers on core 1. The calm caller sends half of its limit over a
few connections in an open loop, and all its requests are timed. The greedy caller has the same
limit, and offers ten times as much over many connections.

Rounds without and with the greedy caller alternate, over HTTP/1 and gRPC. A ratio below 1.1 means
that the calm caller's p99 stays within a tenth. h2load sends the next request of a connection only
after the response to the previous one. The reported rates of the greedy caller show how much it
could not send for that reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import load
import running
from measure import typical
from servers.base import Way
from servers.embedserve import GRPC, MESSAGE, EmbedServe
from workloads import Workload, workload

from embedserve.access.grants import new_token

OVER_LIMIT = 10
CALM_SHARE = 0.5
"""Fraction of its limit that the calm caller offers."""
CALM_CONNECTIONS, GREEDY_CONNECTIONS = 8, 64
CALM_NICENESS = "-10"
"""Niceness of the calm caller. It must measure the server's latency, not the time that the greedy
caller occupies their core. Without the permission, `nice` warns and runs it all the same."""
LEAD_S = 1
"""Seconds that the greedy caller starts earlier, so that it has used up its burst of one second."""


@dataclass(frozen=True)
class Caller:
    """One of the two callers.

    Attributes:
        rate: requests per second that it offers.
    """

    name: str
    authorization: str
    connections: int
    rate: float


def callers(folder: Path, limit: float) -> tuple[Path, Caller, Caller]:
    """Returns (token file, calm caller, greedy caller); each caller has the rate ``limit``."""
    lines, made = [], []
    for name, connections, rate in (
        ("calm", CALM_CONNECTIONS, CALM_SHARE * limit),
        ("greedy", GREEDY_CONNECTIONS, OVER_LIMIT * limit),
    ):
        token, sha256 = new_token()
        lines.append(json.dumps({"name": name, "sha256": sha256, "requests_per_second": limit}))
        made.append(Caller(name, f"Bearer {token}", connections, rate))
    tokens = folder / "tokens"
    tokens.write_text("\n".join(lines))
    return tokens, made[0], made[1]


class GuardedServer(EmbedServe):
    """A server that requires tokens; it is ready once it responds to the calm caller."""

    def __init__(self, tokens: Path, calm: Caller) -> None:
        super().__init__("--tokens", str(tokens))
        self._authorization = calm.authorization

    def headers(self, way: Way, body: bytes) -> dict[str, str]:
        return {**super().headers(way, body), "authorization": self._authorization}


class Driver:
    """Sends the requests of callers over one way of the server."""

    def __init__(self, server: EmbedServe, way: Way, work: Workload, folder: Path) -> None:
        message = server.body(way, work, typical(work))
        is_grpc = way.protocol == "grpc"
        self._way, self._folder = way, folder
        self._headers = load.GRPC_HEADERS if is_grpc else way.headers
        self._body = folder / "body"
        self._body.write_bytes(load.framed(message) if is_grpc else message)
        self._answer_bytes = work.answer_bytes

    def command(self, caller: Caller, seconds: float) -> list[str]:
        headers = {**self._headers, "authorization": caller.authorization}
        post = load.Post(
            self._body,
            headers,
            running.port_of(self._way),
            self._way.path,
            self._answer_bytes,
            self._way.protocol != "grpc",
        )
        command = post.command(caller.connections, 1, seconds, self._log(caller))
        return [*command, f"--rps={caller.rate / caller.connections:.3f}"]

    def calm(self, caller: Caller, seconds: float) -> list[float]:
        """Returns the milliseconds of the caller's requests."""
        command = ["nice", "-n", CALM_NICENESS, *self.command(caller, seconds)]
        load.run(command, seconds)
        return [ms for _, ms in self._ended(caller)]

    @contextmanager
    def greedy(self, caller: Caller, seconds: float) -> Iterator[None]:
        """Runs the caller for ``seconds`` during the block."""
        command = load.pinned(load.LOAD_CORE, self.command(caller, seconds))
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                with subprocess.Popen(["sleep", str(LEAD_S)]) as lead:
                    lead.wait()
                yield
            finally:
                process.wait(timeout=60)

    def rates(self, caller: Caller, seconds: float) -> dict[str, float]:
        """Returns the caller's responses per second by HTTP status. Rejections over gRPC have
        status 200, too."""
        counts = Counter(status for status, _ in self._ended(caller))
        return {status: count / seconds for status, count in sorted(counts.items())}

    def _log(self, caller: Caller) -> Path:
        return self._folder / f"{caller.name}.log"

    def _ended(self, caller: Caller) -> Iterator[tuple[str, float]]:
        log = self._log(caller)
        yield from load.read_log(log)
        log.unlink()


def measure(way: Way, rounds: int, seconds: float, limit: float) -> None:
    work = workload("small", "uniform")
    work.tables.make()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens, calm, greedy = callers(folder, limit)
        server = GuardedServer(tokens, calm)
        driver = Driver(server, way, work, folder)
        alone_ms, beside_ms = [], []
        with running.running(server, work):
            driver.calm(calm, 2)
            for number in range(rounds):
                alone_ms.append(load.quantile(driver.calm(calm, seconds), 0.99))
                with driver.greedy(greedy, seconds + 2 * LEAD_S):
                    beside_ms.append(load.quantile(driver.calm(calm, seconds), 0.99))
                rates = driver.rates(greedy, seconds + 2 * LEAD_S)
                shown = ", ".join(f"{status}: {rate:,.0f}/s" for status, rate in rates.items())
                said = f"p99 {alone_ms[-1]:.2f} ms alone, {beside_ms[-1]:.2f} beside"
                print(f"{way.name}, round {number + 1}: {said}; the greedy one {shown}", flush=True)
        ratio = statistics.median(beside_ms) / statistics.median(alone_ms)
        print(f"{way.name}: the calm one's p99 beside the greedy one is {ratio:.2f} of that alone")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a caller feels of a greedy one.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument(
        "--limit", type=float, default=1000, help="requests a second of each; one offers ten times"
    )
    chosen = parser.parse_args()
    load.need("h2load")
    for way in (MESSAGE, GRPC):
        measure(way, chosen.rounds, chosen.seconds, chosen.limit)


if __name__ == "__main__":
    main()
