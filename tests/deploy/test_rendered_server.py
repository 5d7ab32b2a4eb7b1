"""Tests of a real server with the rendered variables: probes pass, and Prometheus can scrape."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from server.small_store import publish_small_model

from .conftest import Compose
from .rendered_server import Served, running_as, write_secrets

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rendered")
    write_secrets(folder)
    publish_small_model(folder)
    return folder


@pytest.fixture(
    scope="module",
    params=[
        ("tls", "tokens", "monitoring"),
        ("mtls", "management-port", "monitoring"),
        ("mtls", "management-port", "shared-memory"),
    ],
    ids="+".join,
)
def served(request: pytest.FixtureRequest, folder: Path, compose: Compose) -> Iterator[Served]:
    name = "+".join(request.param)
    with running_as(compose(*request.param), folder, name) as served:
        yield served


def test_probes_pass(served: Served) -> None:
    for probe in PROBES:
        assert served.passes(served.rendered.container[probe]), probe


def test_prometheus_can_scrape_the_server(served: Served) -> None:
    for monitor in served.rendered.named("ServiceMonitor"):
        (endpoint,) = monitor["spec"]["endpoints"]
        config = endpoint["tlsConfig"]
        context = served.context(config) if endpoint["scheme"] == "https" else None
        name = config.get("serverName", "")
        headers = {}
        if "authorization" in endpoint:
            secret = endpoint["authorization"]["credentials"]
            token = (served.secrets / secret["name"] / secret["key"]).read_text()
            headers = {"Authorization": f"{endpoint['authorization']['type']} {token}"}
            assert served.get(endpoint["port"], "/metrics", context, {}, name) == 401
        assert served.get(endpoint["port"], "/metrics", context, headers, name) == 200
        if endpoint["port"] != "http":
            assert served.get("http", "/metrics", context, headers, name) == 404


def test_ports_are_reachable_unless_shared_memory_is_used(served: Served) -> None:
    """Uses another address of this host in place of the pod's."""
    for port in served.ports.values():
        try:
            socket.create_connection(("127.0.0.2", port), timeout=10).close()
            is_reached = True
        except ConnectionRefusedError:
            is_reached = False
        assert is_reached == served.rendered.is_reachable
