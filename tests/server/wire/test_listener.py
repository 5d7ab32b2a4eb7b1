"""Tests that a burst of connections is accepted in small groups, so that none waits long."""

import asyncio
import socket
from collections import Counter

from server.raw_http import OurServer, get
from server.waiting import WAIT_S_MAX, until

from embedserve.wire.listener import Listener
from embedserve.wire.wire_server import ACCEPTS_MAX


async def test_burst_of_connections_is_accepted_in_portions() -> None:
    iteration, begun = 0, Counter[int]()

    class CountedProtocol(asyncio.Protocol):
        def __init__(self) -> None:
            begun[iteration] += 1

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.close()

    with socket.create_server(("127.0.0.1", 0)) as sock:
        clients = [socket.create_connection(sock.getsockname()) for _ in range(40)]
        listener = Listener(sock, CountedProtocol, 16)
        listener.start()
        while begun.total() < len(clients):
            await asyncio.sleep(0)
            iteration += 1
        await listener.close(0)
    assert list(begun.values()) == [16, 16, 8]
    assert max(begun) - min(begun) == 2
    for client in clients:
        client.close()


async def test_connection_being_opened_is_drained(server: OurServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(get("/health/live"))
        (listener,) = server.wire._listening
        listener._accept(1)
        await server.wire.drain(WAIT_S_MAX)
        assert client.recv(100).startswith(b"HTTP/1.1 200")


async def test_several_connections_are_accepted_per_iteration(server: OurServer) -> None:
    count = 4 * ACCEPTS_MAX
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(count)]
    iterations = accepted = 0
    while accepted < count:
        await asyncio.sleep(0)
        before, accepted = accepted, len(server.wire.connections)
        iterations += accepted > before
    assert iterations < count / 4
    for client in clients:
        client.close()


async def test_kernel_ends_connections_of_vanished_hosts(server: OurServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)):
        await until(lambda: server.wire.connections)
        (connection,) = server.wire.connections
        accepted = connection._transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        limits = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
        found = [accepted.getsockopt(socket.IPPROTO_TCP, limit) for limit in limits]
    assert found == [60, 15, 120_000]
