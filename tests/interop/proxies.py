"""nginx, HAProxy and Envoy with the configurations of deploy/proxies.

Each is a child process with all its files in one folder.
"""

import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from interop.drivers import python_programs
from interop.tools import ROOT, tool
from running_servers import free_port, started
from waits import wait_until

HOST = "127.0.0.1"
CONFIGURATIONS = ROOT / "deploy" / "proxies"
"""Folder of the complete configurations that docs/proxies.md shows, for servers 10.0.0.1 and
10.0.0.2."""
ADDRESS_FORMS = ("{}:{}", "address: {}, port_value: {}")
"""Formats of an address: in the files of nginx and HAProxy, and in Envoy's."""


class Ports(NamedTuple):
    http: int
    grpc: int


def free_ports() -> Ports:
    return Ports(free_port(), free_port())


def ports_of(http: str, grpc: str) -> Ports:
    """Returns the ports of addresses that end with them."""
    return Ports(*(int(one.rpartition(":")[2]) for one in (http, grpc)))


@dataclass(frozen=True)
class Proxy:
    """A running proxy, its addresses for REST and gRPC, and its log."""

    name: str
    http: str
    grpc: str
    log: Path


def configuration(
    name: str, to: Sequence[Ports], listening: Mapping[str, str], more: Mapping[str, str]
) -> str:
    """Returns a file of deploy/proxies for the servers ``to``, one or two.

    Args:
        listening: addresses in the file, with their replacements.
        more: other texts in the file, with their replacements.
    """
    text = (CONFIGURATIONS / name).read_text("utf-8")
    if len(to) == 1:
        text = "".join(one for one in text.splitlines(True) if "10.0.0.2" not in one)
    replaced = {**listening, **more}
    for number, ports in enumerate(to, 1):
        for theirs, ours in ((8000, ports.http), (8001, ports.grpc)):
            (form,) = (
                one for one in ADDRESS_FORMS if one.format(f"10.0.0.{number}", theirs) in text
            )
            old, new = f"10.0.0.{number}", "127.0.0.1"
            replaced[form.format(old, theirs)] = form.format(new, ours)
    for old in replaced:
        assert old in text, f"{name} has no {old!r}"
    pattern = re.compile("|".join(map(re.escape, replaced)))
    return pattern.sub(lambda found: replaced[found[0]], text)


@contextmanager
def nginx(folder: Path, *to: Ports) -> Iterator[Proxy]:
    """Runs nginx: HTTP/1.1 to one port and HTTP/2 to the other, over keepalive connections."""
    config, ports = folder / "nginx.conf", free_ports()
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f" {kind}_temp_path {folder}/{kind};" for kind in kinds)
    listening = {
        "listen 8000;": f"listen 127.0.0.1:{ports.http};",
        "listen 8001 http2;": f"listen 127.0.0.1:{ports.grpc} http2;",
    }
    config.write_text(configuration(config.name, to, listening, {"http {": "http {" + temporary}))
    process = f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/log warn;"
    command = [tool("nginx"), "-e", "stderr", "-p", str(folder), "-c", str(config), "-g", process]
    with _running("nginx", command, folder, ports) as proxy:
        yield proxy


@contextmanager
def haproxy(folder: Path, *to: Ports, has_checks: bool = True) -> Iterator[Proxy]:
    """Runs HAProxy: HTTP/2 to both ports, few connections for many clients.

    Args:
        has_checks: whether HAProxy checks which servers are ready; not in front of a Service of
            Kubernetes.
    """
    ports = free_ports()
    listening = {
        "bind :8000": f"bind 127.0.0.1:{ports.http}",
        "bind :8001": f"bind 127.0.0.1:{ports.grpc}",
    }
    unchecked = {} if has_checks else {" check inter 1s fall 2": ""}
    text = configuration("haproxy.cfg", to, listening, unchecked)
    with haproxy_of(folder, text, ports) as proxy:
        yield proxy


@contextmanager
def haproxy_of(folder: Path, text: str, ports: Ports) -> Iterator[Proxy]:
    """Runs HAProxy with another configuration, which listens on ``ports``."""
    config = folder / "haproxy.cfg"
    config.write_text(text)
    with _running("haproxy", [tool("haproxy"), "-db", "-f", str(config)], folder, ports) as proxy:
        yield proxy


@contextmanager
def envoy(folder: Path, *to: Ports) -> Iterator[Proxy]:
    """Runs Envoy, from the package index: HTTP/2 to both ports."""
    (program,) = python_programs("envoy").parent.glob("lib/python3*/site-packages/envoy/_bin/envoy")
    program.chmod(0o755)
    config, ports = folder / "envoy.yaml", free_ports()
    form = ADDRESS_FORMS[1]
    listening = {
        form.format("0.0.0.0", 8000): form.format("127.0.0.1", ports.http),
        form.format("0.0.0.0", 8001): form.format("127.0.0.1", ports.grpc),
    }
    config.write_text(configuration(config.name, to, listening, {}))
    options = ("--concurrency", "1", "--disable-hot-restart", "--log-level", "warning")
    with _running("envoy", [str(program), "-c", str(config), *options], folder, ports) as proxy:
        yield proxy


PROXIES: dict[str, Callable[..., AbstractContextManager[Proxy]]] = {
    "nginx": nginx,
    "haproxy": haproxy,
    "envoy": envoy,
}
"""Functions that run each proxy, given a folder and the servers behind it."""


@contextmanager
def _running(name: str, command: Sequence[str], folder: Path, ports: Ports) -> Iterator[Proxy]:
    log = folder / "log"
    with started(command, log, is_warm=False) as process:

        def is_listening() -> bool:
            assert process.poll() is None, log.read_text()
            with socket.socket() as http, socket.socket() as grpc:
                found = (http.connect_ex((HOST, ports.http)), grpc.connect_ex((HOST, ports.grpc)))
            return found == (0, 0)

        wait_until(is_listening, log.read_text)
        yield Proxy(name, f"http://{HOST}:{ports.http}", f"{HOST}:{ports.grpc}", log)
