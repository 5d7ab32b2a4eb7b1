"""Runs a real server as a rendered pod, with its arguments, variables and Secrets.

Mounts become folders, and ports become free ones; all else is as rendered.
"""

import http.client
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certificates import Authority
from running_servers import WIDE, command, free_port, run_warm_command, started
from waits import wait_until

from .conftest import Rendered


@dataclass(frozen=True)
class Served:
    """A running server.

    Attributes:
        rendered: manifests whose ``pod`` it runs.
        variables: environment variables of the server.
        ports: real ports by their names in the container.
        secrets: Secrets by name, each a folder of its keys.
    """

    rendered: Rendered
    variables: dict[str, str]
    ports: dict[str, int]
    secrets: Path

    def passes(self, probe: dict[str, Any]) -> bool:
        """Runs a probe as kubelet does: without a client certificate, without verifying the
        server's.
        """
        if "exec" in probe:
            _, *arguments = probe["exec"]["command"]
            return run_warm_command(*arguments, environment=self.variables).returncode == 0
        http_get = probe["httpGet"]
        context = ssl._create_unverified_context() if http_get.get("scheme") == "HTTPS" else None
        try:
            return self.get(http_get["port"], http_get["path"], context) == 200
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
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[port], timeout=60)
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
        """Returns the TLS context that a ServiceMonitor's ``tlsConfig`` describes."""
        ca = self.secrets / config["ca"]["secret"]["name"] / config["ca"]["secret"]["key"]
        context = ssl.create_default_context(cafile=str(ca))
        if "cert" in config:
            cert, key = config["cert"]["secret"], config["keySecret"]
            paths = (self.secrets / one["name"] / one["key"] for one in (cert, key))
            context.load_cert_chain(*paths)
        return context


def write_secrets(folder: Path, hosts: Sequence[str] = ()) -> None:
    """Writes the Secrets that deploy/README.md tells users to create.

    The server's certificate is also valid for ``hosts``.
    """
    authority = Authority()
    for secret, pair in (
        ("embedserve-tls", authority.sign("server", hosts=["embedserve", *hosts])),
        ("embedserve-prometheus-tls", authority.sign("prometheus")),
    ):
        (folder / secret).mkdir()
        (folder / secret / "tls.crt").write_bytes(pair.certificate)
        (folder / secret / "tls.key").write_bytes(pair.key)
        (folder / secret / "ca.crt").write_bytes(authority.root)
    prometheus = run_warm_command("token", "prometheus", "--roles", "admin")
    router = run_warm_command("token", "router")
    for secret, key, text in (
        ("embedserve-tokens", "tokens", prometheus.stdout + router.stdout),
        ("embedserve-prometheus-token", "token", prometheus.stderr.strip()),
        ("embedserve-shard-token", "token", router.stderr.strip()),
    ):
        (folder / secret).mkdir()
        (folder / secret / key).write_text(text)


@contextmanager
def running_as(
    rendered: Rendered, folder: Path, name: str, changed: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Runs the pod of ``rendered``, yields the server once it is ready, and stops it at the end.

    Args:
        folder: folder with the store and the Secrets.
        name: subfolder for the server's /tmp and its log.
        changed: variables with other values than the rendered ones.
    """
    own = folder / name
    own.mkdir()
    volumes = {one["name"]: one for one in rendered.pod["volumes"]}
    folders = {"/store": folder / "store"}
    for mount in rendered.container["volumeMounts"]:
        volume = volumes[mount["name"]]
        if "secret" in volume:
            folders[mount["mountPath"]] = folder / volume["secret"]["secretName"]
    folders["/tmp"] = own
    ports = {one["name"]: free_port() for one in rendered.container["ports"]}
    variables = dict(rendered.variables)
    for variable, value in variables.items():
        mounted = [at for at in folders if value.startswith(f"{at}/") or value == at]
        if mounted:
            variables[variable] = value.replace(mounted[0], str(folders[mounted[0]]), 1)
    for port_name, port in ports.items():
        variables[f"EMBEDSERVE_{port_name.upper()}_PORT"] = str(port)
    variables |= changed or {}
    log = own / "log"
    words, environment = command(*rendered.container["args"]), os.environ | WIDE | variables
    with started(words, log, env=environment) as process:
        served = Served(rendered, variables, ports, folder)

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            return served.passes(rendered.container["readinessProbe"])

        wait_until(is_ready, log.read_text)
        yield served
