"""Tests of claiming the ports before models load, and of the one line about a port in use."""

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from running_servers import free_port
from server.python import run_python

from embedserve.processes.startup.ports import claim_ports

SERVE = """
import sys
from embedserve.commands.cli import app
try:
    app(["serve", *sys.argv[1:]])
finally:
    print("imported:", *[name for name in ("torch", "torchrec") if name in sys.modules])
"""


@pytest.fixture
def port_in_use() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def test_claimed_ports_cannot_be_claimed_again() -> None:
    with closing(claim_ports("127.0.0.1", 0, 0)) as ports:
        assert ports.http != ports.grpc
        for number in (ports.http, ports.grpc):
            with pytest.raises(OSError, match=f"127.0.0.1:{number} \\(HTTP\\): Address already"):
                claim_ports("127.0.0.1", number, 0)


def test_http_port_in_use_is_named_in_the_error(port_in_use: int) -> None:
    message = f"cannot listen on 127.0.0.1:{port_in_use} \\(HTTP\\): Address already in use"
    with pytest.raises(OSError, match=f"{message}; --http-port chooses another$"):
        claim_ports("127.0.0.1", port_in_use, 0)


def test_grpc_port_in_use_is_named_and_the_http_port_released(port_in_use: int) -> None:
    message = f"cannot listen on 127.0.0.1:{port_in_use} \\(gRPC\\): Address already in use"
    free = free_port()
    with pytest.raises(OSError, match=f"{message}; --grpc-port chooses another$"):
        claim_ports("127.0.0.1", free, port_in_use)
    claim_ports("127.0.0.1", free, 0).close()


def test_management_port_in_use_is_named_in_the_error(port_in_use: int) -> None:
    message = f"cannot listen on 127.0.0.1:{port_in_use} \\(management\\): Address already in use"
    with pytest.raises(OSError, match=f"{message}; --management-port chooses another$"):
        claim_ports("127.0.0.1", 0, 0, ("127.0.0.1", port_in_use))


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_host_may_be_an_ipv6_address() -> None:
    with closing(claim_ports("::1", 0, 0)) as ports:
        socket.create_connection(("::1", ports.http)).close()
        message = f"^cannot listen on \\[::1\\]:{ports.http} \\(HTTP\\): Address already in use"
        with pytest.raises(OSError, match=message):
            claim_ports("::1", ports.http, 0)
        assert ports.release_grpc() == f"[::1]:{ports.grpc}"


def test_same_port_for_both_protocols_is_rejected() -> None:
    free = free_port()
    with pytest.raises(OSError, match=f"127.0.0.1:{free} \\(gRPC\\): Address already in use"):
        claim_ports("127.0.0.1", free, free)


def test_address_of_another_host_is_named_in_the_error() -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1:0 \(HTTP\): Cannot assign requested address$"):
        claim_ports("192.0.2.1", 0, 0)


@pytest.mark.parametrize("host", ["\udcff", "local\0host"])
def test_host_that_cannot_be_a_name_is_named_in_the_error(host: str) -> None:
    with pytest.raises(OSError, match=f"^cannot listen on {host}:0 \\(HTTP\\): .*host ?name"):
        claim_ports(host, 0, 0)


def test_released_grpc_port_can_be_bound() -> None:
    ports = claim_ports("127.0.0.1", 0, 0)
    host, _, number = ports.release_grpc().rpartition(":")
    with socket.socket() as sock:
        sock.bind((host, int(number)))
    ports.close()


def leave_connection_behind(port: int) -> None:
    """Leaves a connection that the server closed first, like a server that was stopped."""
    address = ("127.0.0.1", port)
    with socket.create_server(address) as listening, socket.create_connection(address) as client:
        listening.accept()[0].close()
        client.recv(1)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_shared_ports_stay_claimed_and_closed_until_a_worker_listens(is_fresh: bool) -> None:
    port = free_port()
    if not is_fresh:
        leave_connection_behind(port)
    with closing(claim_ports("127.0.0.1", port, 0).share()) as shared:
        with pytest.raises(OSError, match=f"127.0.0.1:{port} \\(HTTP\\): Address already in use"):
            claim_ports("127.0.0.1", port, 0)
        with pytest.raises(OSError, match=f"127.0.0.1:{shared.grpc} \\(HTTP\\): Address already"):
            claim_ports("127.0.0.1", shared.grpc, 0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_workers_share_claimed_ports_and_other_claims_fail() -> None:
    shared = claim_ports("127.0.0.1", 0, 0, ("127.0.0.1", 0)).share()
    workers = [shared.bind() for _ in range(2)]
    for worker in workers:
        worker.listen(with_grpc=True)
    for port in (shared.http, shared.grpc, shared.management):
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(OSError, match="Address already in use"):
            claim_ports("127.0.0.1", port, 0)
    for worker in workers:
        worker.close()
    shared.close()


def test_grpc_port_of_a_worker_does_not_listen_if_grpcio_serves_it() -> None:
    """grpcio binds the port again: connections that wait on this socket would be lost."""
    shared = claim_ports("127.0.0.1", 0, 0).share()
    with closing(shared), closing(shared.bind()) as worker:
        worker.listen(with_grpc=False)
        socket.create_connection(("127.0.0.1", shared.http)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", shared.grpc))


def test_worker_that_cannot_bind_leaves_no_socket_open() -> None:
    """Fails by the ResourceWarning of a socket that nobody has closed."""
    ports = claim_ports("127.0.0.1", 0, 0)
    ports.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        ports.bind()


@pytest.mark.parametrize("is_fresh", [True, False])
def test_claimed_grpc_port_accepts_connections_only_once_it_listens(is_fresh: bool) -> None:
    """Covers clients and other servers, also after a server that left connections behind."""
    port = free_port()
    if not is_fresh:
        leave_connection_behind(port)
    ports = claim_ports("127.0.0.1", 0, port)
    socket.create_connection(("127.0.0.1", ports.http)).close()
    for protocol in ("HTTP", "gRPC"):
        numbers = (port, 0) if protocol == "HTTP" else (0, port)
        with pytest.raises(OSError, match=f"127.0.0.1:{port} \\({protocol}\\): Address already"):
            claim_ports("127.0.0.1", *numbers)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    ports.listen(with_grpc=True)
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(OSError, match=f"127.0.0.1:{port} \\(gRPC\\): Address already in use"):
        claim_ports("127.0.0.1", 0, port)
    ports.close()


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_serve_on_a_port_in_use_prints_one_line(store: Path, port_in_use: int, option: str) -> None:
    free = "--grpc-port" if option == "--http-port" else "--http-port"
    done = run_python("-c", SERVE, store, option, str(port_in_use), free, str(free_port()))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"embedserve: cannot listen on 127.0.0.1:{port_in_use}")
    assert done.stdout == "imported:\n"  # immediately, without imports and loading
