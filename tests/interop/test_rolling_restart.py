"""Tests of servers that are replaced one by one, as kubelet and endpoints do: no request is lost.

The new server starts next to the old one. Once it is ready, the Service sends requests only to the
new server. The old server gets the time of preStop, and then SIGTERM. Clients of REST, gRPC and
streams send requests throughout, to the Service, and through nginx and HAProxy in front of it.
"""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from interop.proxies import Ports, Proxy, free_ports, haproxy, haproxy_of, nginx
from interop.test_proxy_restart import ANSWERED, Load, load_through
from running_servers import Running, running
from waits import wait_until

ROLLS = 1
ANSWERS = 30
"""Number of responses that each client waits for before and after a server is replaced."""
AGE_S = 3
"""Maximum age of connections in seconds, so that some end for their age during the test."""
EXIT_S_MAX = 30
"""terminationGracePeriodSeconds, after which kubelet kills the container."""
SERVICE = """
global
    nbthread 1
    stats socket {folder}/admin level admin
    log stdout format raw local0
defaults
    mode tcp
    log global
    timeout connect 60s
    timeout client 60s
    timeout server 60s
listen http
    bind 127.0.0.1:{http}
    server a 127.0.0.1:{a.http}
    server b 127.0.0.1:{b.http}
listen grpc
    bind 127.0.0.1:{grpc}
    server a 127.0.0.1:{a.grpc}
    server b 127.0.0.1:{b.grpc}
"""
"""HAProxy as a Service of kube-proxy: new connections go to ready servers, open ones stay."""


class Service:
    """A Service: its ports, and which of its pods are ready."""

    def __init__(self, folder: Path, pods: dict[str, Ports]) -> None:
        self.ports = free_ports()
        self._admin = folder / "admin"
        self.config = SERVICE.format(
            folder=folder, http=self.ports.http, grpc=self.ports.grpc, **pods
        )

    def wait_for_admin(self) -> None:
        """Waits until HAProxy accepts commands on its admin socket.

        HAProxy listens on its ports a moment before the socket exists, and on the socket a moment
        later.
        """
        wait_until(self._is_listening)

    def _is_listening(self) -> bool:
        with socket.socket(socket.AF_UNIX) as admin:
            return admin.connect_ex(str(self._admin)) == 0

    def set_ready(self, pod: str, is_ready: bool) -> None:
        for port in ("http", "grpc"):
            with socket.socket(socket.AF_UNIX) as admin:
                admin.connect(str(self._admin))
                state = "ready" if is_ready else "maint"
                admin.sendall(f"set server {port}/{pod} state {state}\n".encode())
                assert admin.recv(1 << 16).strip() == b""


@pytest.fixture
def pods() -> dict[str, Ports]:
    """Returns the ports of two places; each new server uses the free place."""
    return {name: free_ports() for name in ("a", "b")}


@pytest.fixture
def service(tmp_path: Path, pods: dict[str, Ports]) -> Iterator[Service]:
    service = Service(tmp_path, pods)
    with haproxy_of(tmp_path, service.config, service.ports):
        service.wait_for_admin()
        service.set_ready("a", is_ready=False)
        service.set_ready("b", is_ready=False)
        yield service


@pytest.fixture
def load(service: Service, tmp_path: Path) -> Iterator[Load]:
    """Runs clients of the Service, directly and through a proxy of each kind."""
    ports = service.ports
    own = Proxy("service", f"http://127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}", tmp_path)
    with ExitStack() as open_:
        proxies = [own]
        for start in (nginx, partial(haproxy, has_checks=False)):
            folder = tmp_path / f"proxy-{len(proxies)}"
            folder.mkdir()
            proxies.append(open_.enter_context(start(folder, ports)))
        yield open_.enter_context(load_through(*proxies))


def test_rolling_restart_loses_no_requests(
    store: Path, tmp_path: Path, pods: dict[str, Ports], service: Service, load: Load
) -> None:
    options = ("--wait", "--connection-age-s-max", AGE_S)
    with ExitStack() as ends:

        def start(number: int, pod: str) -> Running:
            log = tmp_path / f"log-{number}"
            return ends.enter_context(running(store, log, *options, ports_used=pods[pod]))

        old, active_pod = start(0, "a"), "a"
        service.set_ready(active_pod, is_ready=True)
        load.start()
        for number in range(1, ROLLS + 1):
            load.wait_for_each(ANSWERS, ANSWERED)
            next_pod = "b" if active_pod == "a" else "a"
            new = start(number, next_pod)  # returns once ready: maxSurge 1, maxUnavailable 0
            service.set_ready(next_pod, is_ready=True)
            service.set_ready(active_pod, is_ready=False)
            load.wait_for_each(ANSWERS // 2, ANSWERED)  # preStop
            old.process.terminate()
            load.wait_for_each(ANSWERS, ANSWERED)
            assert old.process.wait(timeout=EXIT_S_MAX) == 0
            assert "are cut" not in old.log.read_text()
            old, active_pod = new, next_pod
        load.wait_for_each(ANSWERS, ANSWERED)
        load.stop()
    load.check_answered()
