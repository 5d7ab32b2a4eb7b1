"""Servers are replaced one by one, as kubelet and the endpoints do it, and nothing is lost.

The new one starts beside the old; once it is ready, what stands before them sends to it alone; the
old one is given the time of preStop, and then SIGTERM. Clients of REST, gRPC and streams ask all
the while, over the Service and through nginx and HAProxy before it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from interop.proxies import START_S_MAX, Ports, Proxy, haproxy, haproxy_of, nginx
from interop.test_proxy_restart import ANSWERED, Load, add_clients
from running_servers import Running, free_port, running

ROLLS = 1
ANSWERS = 30
"""Of each client, before and after a server is replaced."""
STEP_S_MAX = 180
AGE_S = 3
"""So that connections are ended for their age meanwhile, too."""
EXIT_S_MAX = 30
"""terminationGracePeriodSeconds: then kubelet kills."""
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
"""A Service as kube-proxy makes it: new connections go to what is ready, open ones stay."""


class Service:
    """Where the pods are reached, and which of them are ready."""

    def __init__(self, folder: Path, pods: dict[str, Ports]) -> None:
        self.ports = Ports(free_port(), free_port())
        self._admin = folder / "admin"
        self.config = SERVICE.format(
            folder=folder, http=self.ports.http, grpc=self.ports.grpc, **pods
        )

    def wait_for_admin(self) -> None:
        """HAProxy listens on its ports a moment before its socket is there, and on that a moment
        later."""
        end = time.monotonic() + START_S_MAX
        while not self._is_listening():
            assert time.monotonic() < end, "HAProxy listens on no socket"
            time.sleep(0.01)

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
    """Two places, of which each server takes the one that is free."""
    return {name: Ports(free_port(), free_port()) for name in ("a", "b")}


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
    """Of the Service itself, and through a proxy of each kind before it."""
    load = Load()
    ports = service.ports
    own = Proxy("service", f"http://127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}", tmp_path)
    with ExitStack() as open_:
        proxies = [own]
        for start in (nginx, partial(haproxy, has_checks=False)):
            folder = tmp_path / f"proxy-{len(proxies)}"
            folder.mkdir()
            proxies.append(open_.enter_context(start(folder, ports)))
        for proxy in proxies:
            add_clients(load, open_, proxy, proxy.name, STEP_S_MAX)
        yield load
        load.stop()


def test_a_rolling_restart_loses_nothing(
    store: Path, tmp_path: Path, pods: dict[str, Ports], service: Service, load: Load
) -> None:
    options = ("--wait", "--connection-age-s-max", AGE_S)
    with ExitStack() as ends:

        def start(number: int, pod: str) -> Running:
            ports = (pods[pod].http, pods[pod].grpc)
            log = tmp_path / f"log-{number}"
            return ends.enter_context(running(store, log, *options, ports_used=ports))

        old, place = start(0, "a"), "a"
        service.set_ready(place, is_ready=True)
        load.start()
        for number in range(1, ROLLS + 1):
            load.until_each(ANSWERS, ANSWERED)
            other = "b" if place == "a" else "a"
            new = start(number, other)  # until it is ready: maxSurge 1, maxUnavailable 0
            service.set_ready(other, is_ready=True)
            service.set_ready(place, is_ready=False)
            load.until_each(ANSWERS // 2, ANSWERED)  # preStop
            old.process.terminate()
            load.until_each(ANSWERS, ANSWERED)
            assert old.process.wait(timeout=EXIT_S_MAX) == 0
            assert "are cut" not in old.log.read_text()
            old, place = new, other
        load.until_each(ANSWERS, ANSWERED)
        load.stop()
    for name, met in load.outcomes.items():
        assert set(met) <= ANSWERED, (name, met)
