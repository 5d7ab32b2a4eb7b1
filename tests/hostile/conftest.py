"""Fixtures of the hostile tests: one real server, a canary client, and peers that are closed.

Every test runs inside `unharmed`. Whatever a test does to the server, the canary client gets
correct responses soon, and the server keeps neither the memory nor the sockets.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import Authority
from hostile.canary_client import Neighbour, anonymous_kib, open_sockets
from hostile.peer import Peer
from hostile.target_server import table
from server.python import environment
from server.waiting import given_up_after
from waits import wait_until

SCRIPT = Path(__file__).with_name("target_server.py")
STOP_S_MAX = 60
TEST_S_MAX = 300
SLOWEST_S_MAX = 2.0
"""Bound on the canary client's response times in seconds, without the time that it and the server
waited for a core."""
GROWTH_KIB_MAX = 24 << 10
"""Default bound on the growth of the server's memory; a test sets another by
@pytest.mark.growth(kib)."""
FORGET_S_MAX = 60.0


@dataclass(frozen=True)
class Victim:
    """Ports and process of the server under attack.

    Attributes:
        root: over TLS, the file of the root certificate that signed the server's.
    """

    http_port: int
    grpc_port: int
    pid: int
    log: Path
    root: str = ""


@pytest.fixture(scope="session")
def rows() -> np.ndarray:
    """Returns the rows of the table."""
    return table()


def on_another_core() -> list[str]:
    """Returns the prefix of the server's command that pins it to another core, where these tests
    have only one core (make hostile). The server then shares its core with no test, as if the
    clients were on other hosts.
    """
    ours = os.sched_getaffinity(0)
    others = set(range(os.cpu_count() or 1)) - ours
    return ["taskset", "-c", str(min(others))] if len(ours) == 1 and others else []


@contextmanager
def running_victim(log: Path, *arguments: str) -> Iterator[Victim]:
    """Runs a server; stops it by SIGTERM at the end, which it must still obey."""
    command = [*on_another_core(), sys.executable, str(SCRIPT), *arguments]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=errors
        )
    with process:
        try:
            assert process.stdout is not None
            http_port, grpc_port = map(int, process.stdout.readline().split())
            yield Victim(http_port, grpc_port, process.pid, log)
            assert process.poll() is None, log.read_text()
            process.terminate()
            assert process.wait(STOP_S_MAX) == 0, log.read_text()
        finally:
            process.kill()


def victim_and_canary(
    *limits: str, has_tls: bool = False
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the fixtures ``victim`` and ``canary``: a server with these limits and its canary
    client. A module that assigns both has a server of its own.
    """

    @pytest.fixture(scope="session")
    def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
        folder, arguments, root = tmp_path_factory.mktemp("hostile"), list(limits), ""
        if has_tls:
            authority = Authority()
            root = str(folder / "root.pem")
            Path(root).write_bytes(authority.root)
            arguments += map(str, authority.sign("server").write(folder, "server"))
        with running_victim(folder / "log", *arguments) as victim:
            yield replace(victim, root=root)

    @pytest.fixture(scope="session")
    def canary(victim: Victim, rows: np.ndarray) -> Iterator[Neighbour]:
        ports = victim.http_port, victim.grpc_port
        with Neighbour(*ports, victim.pid, rows, victim.root) as canary:
            yield canary

    return victim, canary


victim, canary = victim_and_canary()


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    with given_up_after(TEST_S_MAX):
        yield


class Bounds:
    """Bounds on what a test may do to the server, and the connections of the test.

    Attributes:
        peers: connections to close before the server is checked.
    """

    def __init__(self, victim: Victim, canary: Neighbour, growth_kib_max: int) -> None:
        self.peers: list[Peer | socket.socket] = []
        self._victim = victim
        self._canary = canary
        self._growth_kib_max = growth_kib_max
        self._sockets = canary.begin().sockets
        self._before_kib = anonymous_kib(victim.pid)
        self._log_bytes = victim.log.stat().st_size

    def check(self) -> dict[str, float]:
        """Checks that the measurements are within the bounds, and returns them."""
        seen = self._canary.seen()
        growth_kib = seen.anonymous_kib_max - self._before_kib
        assert seen.failures == []
        assert seen.slowest_s < SLOWEST_S_MAX
        assert growth_kib < self._growth_kib_max
        self.close()
        wait_until(
            lambda: open_sockets(self._victim.pid) <= self._sockets,
            lambda: "sockets of closed connections are still open",
            FORGET_S_MAX,
        )
        assert "Traceback" not in self._victim.log.read_text()[self._log_bytes :]
        return {
            "health_ms": round(seen.health_s_max * 1e3, 1),
            "embed_ms": round(seen.embed_s_max * 1e3, 1),
            "growth_kib": growth_kib,
        }

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


@pytest.fixture(autouse=True)
def unharmed(request: pytest.FixtureRequest, victim: Victim, canary: Neighbour) -> Iterator[Bounds]:
    """Provides the bounds of every test; pytest_runtest_call checks them."""
    marker = request.node.get_closest_marker("growth")
    bounds = Bounds(victim, canary, marker.args[0] if marker else GROWTH_KIB_MAX)
    yield bounds
    bounds.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Iterator[None]:
    """Fails a test that leaves the server harmed."""
    result = yield
    bounds = item.funcargs.get("unharmed")
    if isinstance(bounds, Bounds):
        item.user_properties += bounds.check().items()
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints with -v the cost of each test to other clients, the slowest first."""
    if terminalreporter.verbosity < 1:
        return
    passed = [one for one in terminalreporter.getreports("passed") if one.when == "call"]
    felt = [(dict(one.user_properties), one.nodeid) for one in passed]
    lines = [
        (one["health_ms"], one["embed_ms"], one["growth_kib"] / 1024, name)
        for one, name in felt
        if "health_ms" in one
    ]
    if not lines:
        return
    terminalreporter.section(
        "the canary client's slowest /health/live and embed, memory of the server"
    )
    for health_ms, embed_ms, growth_mib, name in sorted(lines, reverse=True):
        terminalreporter.write_line(
            f"{health_ms:7.1f} ms {embed_ms:7.1f} ms {growth_mib:+8.1f} MiB  {name}"
        )


MakePeer = Callable[..., Peer]
"""Opens a connection, which is closed when the test ends. Takes the options of Peer."""


def peers_of(port: int, bounds: Bounds) -> MakePeer:
    def connect(**options: Any) -> Peer:
        peer = Peer(port, **options)
        bounds.peers.append(peer)
        return peer

    return connect


@pytest.fixture
def rest_peer(victim: Victim, unharmed: Bounds) -> MakePeer:
    """Returns a function that connects to the HTTP port."""
    return peers_of(victim.http_port, unharmed)


@pytest.fixture
def grpc_peer(victim: Victim, unharmed: Bounds) -> MakePeer:
    """Returns a function that connects to the gRPC port."""
    return peers_of(victim.grpc_port, unharmed)
