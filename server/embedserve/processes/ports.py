"""Claims the ports before anything is loaded, so that one in use is said at once.

The claimed HTTP and management ports listen: of two servers that start together the second is
refused. That of gRPC is bound, and refuses connections until the server is ready: balancers then
use another server, where an error in an answer would reach their clients. Ports that workers share
are claimed as well, then held without listening: each worker listens for itself once it is warm.
Unix sockets cannot be bound twice: workers listen on the same ones, where callers wait
until one of them takes connections.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from embedserve.processes.socket_files import SocketFile, listen_at

BACKLOG = 4096


@dataclass(frozen=True)
class Ports:
    """The claimed ports of one server; the numbers are real also where 0 was asked for."""

    host: str
    http: int
    grpc: int
    http_socket: socket.socket
    grpc_socket: socket.socket | None
    """None: this process takes no connection there."""
    management: int = -1
    """-1: there is none."""
    management_socket: socket.socket | None = None
    are_shared: bool = False
    """Whether other processes of this server listen on them, too."""
    unix: tuple[SocketFile, ...] = ()
    """Sockets that take what both ports take, from callers on this host."""

    @property
    def sockets(self) -> list[socket.socket]:
        """Of the ports."""
        found = [self.http_socket, self.grpc_socket, self.management_socket]
        return [one for one in found if one is not None]

    def listen(self, *, with_grpc: bool) -> None:
        """Has connections wait until they are taken; on gRPC's port only ``with_grpc``: grpcio
        binds it anew, and those that wait would be lost."""
        for sock in self.sockets:
            if with_grpc or sock is not self.grpc_socket:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # see _keep_others_away
                sock.listen(BACKLOG)

    def without_grpc(self) -> Ports:
        """The same ports for a process that takes no connection on gRPC's."""
        return replace(self, grpc_socket=None)

    def release_grpc(self) -> str:
        """The address (HOST:PORT) for grpcio, which binds by itself and does so at once."""
        if self.grpc_socket is not None:
            self.grpc_socket.close()
        return f"{bracketed(self.host)}:{self.grpc}"

    def remove_files(self) -> None:
        """No caller finds Unix sockets from now on; only in the process that claimed them."""
        for one in self.unix:
            one.remove()

    def close(self) -> None:
        _close(self.sockets, self.unix)

    def share(self) -> SharedPorts:
        """The same ports, held for workers; connections are refused from now on until one of
        them listens."""
        held = tuple(map(_hold, self.sockets))
        _close(self.sockets, ())
        return SharedPorts(self.host, self.http, self.grpc, self.management, held, self.unix)


@dataclass(frozen=True)
class SharedPorts:
    """Ports that the workers of one server listen on, and no other server.

    Attributes:
        held: sockets that are bound and do not listen, so that no connection comes to them.
    """

    host: str
    http: int
    grpc: int
    management: int
    held: tuple[socket.socket, ...]
    unix: tuple[SocketFile, ...] = ()

    def bind(self) -> Ports:
        """The same ports with sockets of this worker's own, which it makes listen.

        Raises:
            OSError: a port was taken from us.
        """
        http, grpc, *more = map(_bind_shared, self.held)
        management = more[0] if more else None
        numbers = (self.http, self.grpc)
        return Ports(self.host, *numbers, http, grpc, self.management, management, True, self.unix)

    def remove_files(self) -> None:
        """As that of Ports."""
        for one in self.unix:
            one.remove()

    def close(self) -> None:
        _close(self.held, self.unix)


def claim_ports(
    host: str,
    http_port: int,
    grpc_port: int,
    management: tuple[str, int] | None = None,
    unix: Sequence[tuple[str, int, str]] = (),
) -> Ports:
    """Listens on the HTTP port, on that of ``management``, a host and a port, and at each path of
    ``unix``, with the mode of its file and what it is called in errors; binds gRPC's port.

    Raises:
        OSError: one of them is in use, or the address is not this host's; names it.
    """
    wanted = [(host, http_port, "HTTP", True), (host, grpc_port, "gRPC", False)]
    wanted += [] if management is None else [(*management, "management", True)]
    sockets: list[socket.socket] = []
    files: list[SocketFile] = []
    try:
        for one in wanted:
            sockets.append(_claim(*one))  # noqa: PERF401  those before are closed
        for path, mode, protocol in unix:
            files.append(listen_at(path, mode, protocol))
    except OSError:
        _close(sockets, files)
        raise
    http, grpc, *more = sockets
    ports = Ports(host, _port(http), _port(grpc), http, grpc, unix=tuple(files))
    return replace(ports, management=_port(*more), management_socket=more[0]) if more else ports


def _close(sockets: Iterable[socket.socket], files: Iterable[SocketFile]) -> None:
    for sock in sockets:
        sock.close()
    for file in files:
        file.close()


def _port(sock: socket.socket) -> int:
    number: int = sock.getsockname()[1]
    return number


def _claim(host: str, port: int, protocol: str, listens: bool) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        if listens:
            sock.listen(BACKLOG)
        else:
            _keep_others_away(sock)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        raise OSError(
            f"cannot listen on {bracketed(host)}:{port} ({protocol}): {reason}"
        ) from error
    return sock


def _keep_others_away(bound: socket.socket) -> None:
    """Lets no other server bind the port of ``bound``, which does not listen.

    With SO_REUSEADDR a socket may be bound, and listen, beside connections of the server before,
    which the kernel remembers for a minute; without it no other socket may be bound beside it.
    """
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def _hold(claimed: socket.socket) -> socket.socket:
    """A socket on the port of ``claimed``, bound while that still keeps others away."""
    claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held = _bind_shared(claimed)
    _keep_others_away(held)
    return held


def _bind_shared(other: socket.socket) -> socket.socket:
    """A socket on the port of ``other``, which it shares."""
    sock = socket.socket(other.family, socket.SOCK_STREAM)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        sock.setsockopt(socket.SOL_SOCKET, option, 1)
    sock.bind(other.getsockname())
    return sock


def bracketed(host: str) -> str:
    """``host`` as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
