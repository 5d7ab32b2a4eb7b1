"""Binding ports before models load, and the one line that a port in use is worth."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from server.live import free_port
from server.python import run_python

from embedserve.config import ServeSettings
from embedserve.server import bind_http, check_port_free

SERVE = """
import sys
from embedserve.cli import app
try:
    app(["serve", *sys.argv[1:]])
finally:
    print("imported:", *[name for name in ("torch", "torchrec") if name in sys.modules])
"""


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def test_a_free_port_is_bound_but_takes_no_connection_yet() -> None:
    with bind_http(ServeSettings(store=Path(), http_port=0)) as sock:
        with socket.socket() as client, pytest.raises(ConnectionRefusedError):
            client.connect(sock.getsockname())
        sock.listen()


def test_a_taken_http_port_is_named(taken_port: int) -> None:
    message = f"cannot listen on 127.0.0.1:{taken_port} \\(HTTP\\): Address already in use"
    with pytest.raises(OSError, match=message):
        bind_http(ServeSettings(store=Path(), http_port=taken_port))


def test_a_taken_grpc_port_is_named(taken_port: int) -> None:
    message = f"cannot listen on 127.0.0.1:{taken_port} \\(gRPC\\): Address already in use"
    with pytest.raises(OSError, match=message):
        check_port_free("127.0.0.1", taken_port)
    check_port_free("127.0.0.1", free_port())


def test_an_address_of_another_host_is_named() -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1:0 \(HTTP\): Cannot assign"):
        bind_http(ServeSettings(store=Path(), host="192.0.2.1", http_port=0))


@pytest.mark.parametrize("taken", ["--http-port", "--grpc-port"])
def test_serving_on_a_taken_port_is_one_line(store: Path, taken_port: int, taken: str) -> None:
    free = "--grpc-port" if taken == "--http-port" else "--http-port"
    done = run_python("-c", SERVE, store, taken, str(taken_port), free, str(free_port()))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"embedserve: cannot listen on 127.0.0.1:{taken_port}")
    assert done.stdout == "imported:\n"  # said at once, not after seconds of imports and loading
