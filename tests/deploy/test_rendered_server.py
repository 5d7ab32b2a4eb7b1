"""A real server with the rendered variables: kubelet's probes pass, and Prometheus' scrape works.

Mounts are folders and ports are free ones; all else is as rendered.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from forkserver import WarmPopen
from running_servers import WIDE, command, free_port, run_command, run_warm_command
from server.small_store import publish_small_model

from .conftest import Compose, Rendered

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
READY_S_MAX = 120
STOPPED_S_MAX = 60


@dataclass(frozen=True)
class Served:
    """A running server.

    Attributes:
        variables: those that it runs with.
        ports: its real ports by their names in the container.
        secrets: Secrets by name, each a folder of its keys.
    """

    rendered: Rendered
    variables: dict[str, str]
    ports: dict[str, int]
    secrets: Path

    def passes(self, probe: dict[str, Any], *, is_warm: bool = False) -> bool:
        """Runs a probe as kubelet does: without a certificate, and verifying none. A warm command
        leaves the CPU time to a server that starts."""
        if "exec" in probe:
            _, *arguments = probe["exec"]["command"]
            run = run_warm_command if is_warm else run_command
            return run(*arguments, environment=self.variables).returncode == 0
        asked = probe["httpGet"]
        context = ssl._create_unverified_context() if asked.get("scheme") == "HTTPS" else None
        try:
            return self.get(asked["port"], asked["path"], context) == 200
        except OSError:
            return False

    def get(
        self,
        port: str,
        path: str,
        context: ssl.SSLContext | None,
        headers: dict[str, str] | None = None,
        server_name: str = "localhost",
    ) -> int:
        """Returns the status of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[port], timeout=10)
        try:
            connection.connect()
            if context:
                connection.sock = context.wrap_socket(connection.sock, server_hostname=server_name)
            connection.request("GET", path, headers=headers or {})
            status: int = connection.getresponse().status
            return status
        finally:
            connection.close()

    def context(self, config: dict[str, Any]) -> ssl.SSLContext:
        """Trusts and presents what a ServiceMonitor's ``tlsConfig`` names."""
        ca = self.secrets / config["ca"]["secret"]["name"] / config["ca"]["secret"]["key"]
        context = ssl.create_default_context(cafile=str(ca))
        if "cert" in config:
            cert, key = config["cert"]["secret"], config["keySecret"]
            paths = (self.secrets / one["name"] / one["key"] for one in (cert, key))
            context.load_cert_chain(*paths)
        return context


def write_secrets(folder: Path) -> None:
    """The Secrets that deploy/README.md tells users to create."""
    authority = Authority()
    for secret, pair in (
        ("embedserve-tls", authority.sign("server", hosts=["embedserve"])),
        ("embedserve-prometheus-tls", authority.sign("prometheus")),
    ):
        (folder / secret).mkdir()
        (folder / secret / "tls.crt").write_bytes(pair.certificate)
        (folder / secret / "tls.key").write_bytes(pair.key)
        (folder / secret / "ca.crt").write_bytes(authority.root)
    done = run_command("token", "prometheus", "--roles", "admin")
    for secret, key, text in (
        ("embedserve-tokens", "tokens", done.stdout),
        ("embedserve-prometheus-token", "token", done.stderr.strip()),
    ):
        (folder / secret).mkdir()
        (folder / secret / key).write_text(text)


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
    rendered = compose(*request.param)
    volumes = {one["name"]: one for one in rendered.pod["volumes"]}
    folders = {"/store": folder / "store"}
    for mount in rendered.container["volumeMounts"]:
        volume = volumes[mount["name"]]
        if "secret" in volume:
            folders[mount["mountPath"]] = folder / volume["secret"]["secretName"]
    folders["/tmp"] = folder
    ports = {one["name"]: free_port() for one in rendered.container["ports"]}
    variables = dict(rendered.variables)
    for name, value in variables.items():
        mounted = [at for at in folders if value.startswith(at)]
        if mounted:
            variables[name] = value.replace(mounted[0], str(folders[mounted[0]]), 1)
    for name, port in ports.items():
        variables[f"EMBEDSERVE_{name.upper()}_PORT"] = str(port)
    log = folder / "log"
    with log.open("wb") as output:
        process = WarmPopen(
            command(*rendered.container["args"]),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | WIDE | variables,
        )
    served = Served(rendered, variables, ports, folder)
    try:
        end = time.monotonic() + READY_S_MAX
        while not served.passes(rendered.container["readinessProbe"], is_warm=True):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield served
    finally:
        process.terminate()
        process.wait(timeout=STOPPED_S_MAX)


def test_probes_pass(served: Served) -> None:
    for probe in PROBES:
        assert served.passes(served.rendered.container[probe]), probe


def test_prometheus_scrapes(served: Served) -> None:
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


def test_other_pods_reach_the_ports_unless_memory_is_shared(served: Served) -> None:
    """Another address of this host stands for the pod's own."""
    for port in served.ports.values():
        try:
            socket.create_connection(("127.0.0.2", port), timeout=10).close()
            is_reached = True
        except ConnectionRefusedError:
            is_reached = False
        assert is_reached == served.rendered.is_reachable
