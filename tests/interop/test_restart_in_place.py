"""Tests of a restart of one of two servers behind a proxy, on its ports and under load.

No request is lost. While the server loads, it refuses connections on its gRPC port and responds 503
on its HTTP port. The proxy retries with the other server. HAProxy and Envoy also check readiness;
nginx cannot.
"""

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from interop.proxies import PROXIES, Ports, free_ports
from interop.test_proxy_restart import ANSWERED, Load, load_through
from running_servers import Running, running, status
from waits import wait_until

CLIENTS = 2
"""Number of clients of each kind, so that requests arrive while others are in flight."""
ANSWERS = 25
"""Number of responses that each client waits for before and after the restart."""
STEP_S_MAX = 180
ANSWERED_PROTOCOL = re.compile(
    r'^embedserve_requests_total\{.*outcome="OK",protocol="(\w+)".*\} (?!0\.0$)', re.MULTILINE
)
"""Matches a line of /metrics with a count of responses other than 0. Parsing all lines would take
most of the time of a test that polls."""


@pytest.fixture(scope="module")
def lasting(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    """Runs the server that does not restart, and yields its ports."""
    ports = free_ports()
    log = tmp_path_factory.mktemp("lasting") / "log"
    with running(store, log, ports_used=ports):
        yield ports


@pytest.fixture
def restarted() -> Ports:
    """Returns the ports of the server that restarts."""
    return free_ports()


@pytest.fixture
def load(
    lasting: Ports, restarted: Ports, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Load]:
    with (
        PROXIES[request.param](tmp_path, lasting, restarted) as proxy,
        load_through(proxy, clients=CLIENTS) as load,
    ):
        yield load


@pytest.mark.parametrize(
    ("load", "workers"),
    [("nginx", 1), ("nginx", 2), ("haproxy", 2), ("envoy", 2)],
    indirect=["load"],
)
def test_restart_in_place_behind_a_proxy_loses_no_requests(
    store: Path, tmp_path: Path, restarted: Ports, load: Load, workers: int
) -> None:
    options, late = ("--workers", workers, "--wait"), tmp_path / "late"
    late.mkdir()

    def publish_later() -> None:
        """Publishes after every client got responses. Until then the server loads."""
        wait_until(lambda: status(f"http://127.0.0.1:{restarted.http}/health/live") == 200)
        load.wait_for_each(ANSWERS, ANSWERED)
        shutil.copytree(store, tmp_path / "copy")
        for model in (tmp_path / "copy").iterdir():
            model.rename(late / model.name)

    with ThreadPoolExecutor(1) as thread:
        with running(store, tmp_path / "first", *options, ports_used=restarted) as server:
            load.wait_until_answered()
            load.start()
            load.wait_for_each(ANSWERS, ANSWERED)
            server.process.terminate()
            assert server.process.wait(timeout=STEP_S_MAX) == 0
        published = thread.submit(publish_later)
        with running(late, tmp_path / "second", *options, ports_used=restarted) as server:
            published.result()
            wait_until(
                lambda: {"rest", "grpc"} <= answered_protocols(server)
            )  # it gets requests again
            load.wait_for_each(ANSWERS, ANSWERED)
            load.stop()
    load.check_answered()


def answered_protocols(server: Running) -> set[str]:
    return set(ANSWERED_PROTOCOL.findall(server.metrics()))
