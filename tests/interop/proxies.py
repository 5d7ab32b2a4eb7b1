"""nginx and HAProxy from Debian, as child processes with all their files in one folder."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from interop.tools import tool
from running_servers import free_port

START_S_MAX = 30
NGINX = """
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/log warn;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/client_body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_max_body_size 64m;
    upstream rest {{ {to_http} keepalive 8; }}
    upstream grpc {{ {to_grpc} keepalive 8; }}
    server {{
        listen 127.0.0.1:{http};
        location / {{
            proxy_pass http://rest;
            proxy_next_upstream error timeout http_503 non_idempotent;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host localhost;
        }}
    }}
    server {{
        listen 127.0.0.1:{grpc} http2;
        location / {{
            grpc_pass grpc://grpc;
            grpc_set_header Host localhost;
            grpc_next_upstream error timeout non_idempotent;
        }}
        error_page 502 = @unavailable;
        location @unavailable {{ add_header grpc-status 14; return 204; }}
    }}
}}
"""
"""HTTP/1.1 to the one port and HTTP/2 to the other, both over connections that are kept. A request
that one server refuses goes to another where there is one (deploy/README.md). What nginx itself
refuses of gRPC, it refuses in gRPC's way."""
HAPROXY = """
global
    nbthread 1
    log stdout format raw local0
defaults
    mode http
    log global
    option httplog
    retries 0
    timeout connect 60s
    timeout client 60s
    timeout server 60s
frontend http
    bind 127.0.0.1:{http}
    default_backend rest
frontend grpc
    bind 127.0.0.1:{grpc} proto h2
    default_backend grpc
backend rest
    server one 127.0.0.1:{to_http} proto h2
backend grpc
    server one 127.0.0.1:{to_grpc} proto h2
"""
"""HTTP/2 to both ports, of many clients over few connections."""


@dataclass(frozen=True)
class Ports:
    http: int
    grpc: int


@dataclass(frozen=True)
class Proxy:
    """A running proxy: where it takes REST and gRPC, and what it writes."""

    name: str
    http: str
    grpc: str
    log: Path


@contextmanager
def nginx(folder: Path, *to: Ports) -> Iterator[Proxy]:
    """Before each of the servers ``to``."""
    config, ports = folder / "nginx.conf", Ports(free_port(), free_port())
    config.write_text(
        NGINX.format(
            folder=folder,
            http=ports.http,
            grpc=ports.grpc,
            to_http=_upstreams(one.http for one in to),
            to_grpc=_upstreams(one.grpc for one in to),
        )
    )
    command = [tool("nginx"), "-e", "stderr", "-p", str(folder), "-c", str(config)]
    with _running("nginx", command, folder, ports) as proxy:
        yield proxy


@contextmanager
def haproxy(folder: Path, to: Ports) -> Iterator[Proxy]:
    ports = Ports(free_port(), free_port())
    text = HAPROXY.format(http=ports.http, grpc=ports.grpc, to_http=to.http, to_grpc=to.grpc)
    with haproxy_of(folder, text, ports) as proxy:
        yield proxy


@contextmanager
def haproxy_of(folder: Path, text: str, ports: Ports) -> Iterator[Proxy]:
    """HAProxy with another configuration, which listens on ``ports``."""
    config = folder / "haproxy.cfg"
    config.write_text(text)
    with _running("haproxy", [tool("haproxy"), "-db", "-f", str(config)], folder, ports) as proxy:
        yield proxy


PROXIES: dict[str, Callable[[Path, Ports], AbstractContextManager[Proxy]]] = {
    "nginx": nginx,
    "haproxy": haproxy,
}


def _upstreams(ports: Iterable[int]) -> str:
    return " ".join(f"server 127.0.0.1:{port} fail_timeout=1s;" for port in ports)


@contextmanager
def _running(name: str, command: Sequence[str], folder: Path, ports: Ports) -> Iterator[Proxy]:
    log = folder / "log"
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        for port in (ports.http, ports.grpc):
            _wait_until_it_listens(process, port, log)
        yield Proxy(name, f"http://127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}", log)
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + START_S_MAX
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise AssertionError(f"the proxy does not listen: {log.read_text()}")
