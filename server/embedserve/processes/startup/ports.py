"""Claims the ports before anything is loaded, so that a port in use is reported immediately.

The claimed HTTP and management ports listen: of two servers that start together the second fails.
The gRPC port is bound, and refuses connections until the server is ready. Balancers then use
another server, while an error response would reach their clients. Ports shared by workers are
claimed as well, then held without listening. Each worker listens for itself: at the first start
once all are warm, later once it serves what the others serve. Unix sockets cannot be bound twice,
so workers listen on the same ones. Connections to them wait until a worker accepts them.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from embedserve.config import bracketed
from embedserve.processes.startup.socket_files import SocketFile, listen_at
from embedserve.wire.listener import BACKLOG


@dataclass(frozen=True)
class Ports:
    """The claimed ports of one server. The numbers are the actual ports, also if 0 was
    requested."""

    host: str
    http: int
    grpc: int
    http_socket: socket.socket
    grpc_socket: socket.socket | None
    """Bound gRPC socket; None if this process accepts no connection on that port."""
    management: int = -1
    """Number of the management port; -1 if there is none."""
    management_socket: socket.socket | None = None
    are_shared: bool = False
    """Whether processes of this server share the ports: the sockets are those of ``share``, or of
    ``bind`` in one of the processes."""
    unix: tuple[SocketFile, ...] = ()
    """Unix sockets, which accept the protocols of both ports from callers on this host."""

    @property
    def sockets(self) -> list[socket.socket]:
        """Sockets of the TCP ports."""
        found = [self.http_socket, self.grpc_socket, self.management_socket]
        return [one for one in found if one is not None]

    def listen(self, *, with_grpc: bool) -> None:
        """Makes the ports listen, so that connections wait until they are accepted. The gRPC port
        listens only ``with_grpc``: grpcio binds it again, and connections waiting on the old socket
        would be lost."""
        for sock in self.sockets:
            if with_grpc or sock is not self.grpc_socket:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # see _keep_others_away
                sock.listen(BACKLOG)

    def release_grpc(self) -> str:
        """Closes the gRPC socket and returns its address (HOST:PORT) for grpcio, which binds it
        immediately."""
        if self.grpc_socket is not None:
            self.grpc_socket.close()
        return f"{bracketed(self.host)}:{self.grpc}"

    def remove_files(self) -> None:
        """Removes the Unix socket files, so that no new caller connects. Has an effect only in the
        process that claimed them."""
        for one in self.unix:
            one.remove()

    def close(self) -> None:
        _close(self.sockets, self.unix)

    def share(self) -> Ports:
        """Returns the same ports, reserved for the workers of this server: their sockets are bound
        and do not listen, so that they get no connections. Connections are refused from now on
        until a worker listens."""
        reserved = self._with_sockets(_reserve)
        _close(self.sockets, ())
        return reserved

    def bind(self) -> Ports:
        """Returns shared ports with new sockets, on which this worker listens.

        Raises:
            OSError: another process has taken a port of this server.
        """
        return self._with_sockets(_bind_shared)

    def _with_sockets(self, make: Callable[[socket.socket], socket.socket]) -> Ports:
        """Returns shared ports with a socket that ``make`` returns for each of these."""
        grpc, management = self.grpc_socket, self.management_socket
        return replace(
            self,
            http_socket=make(self.http_socket),
            grpc_socket=None if grpc is None else make(grpc),
            management_socket=None if management is None else make(management),
            are_shared=True,
        )


def claim_ports(
    host: str,
    http_port: int,
    grpc_port: int,
    management: tuple[str, int] | None = None,
    unix: Sequence[tuple[str, int, str]] = (),
) -> Ports:
    """Listens on the HTTP port, the ``management`` address and the ``unix`` paths, and binds the
    gRPC port.

    Args:
        management: host and port; None for no management port.
        unix: path, file mode and protocol name, used in errors, of each Unix socket.

    Raises:
        OSError: a port or path is in use, or the address is not this host's; the message names it.
    """
    addresses = [(host, http_port, "HTTP", True), (host, grpc_port, "gRPC", False)]
    addresses += [] if management is None else [(*management, "management", True)]
    sockets: list[socket.socket] = []
    files: list[SocketFile] = []
    try:
        for address in addresses:
            sockets.append(_claim(*address))  # noqa: PERF401  those before are closed
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
    except (OSError, TypeError) as error:  # TypeError: the host cannot be the name of one
        sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            reason += f"; --{protocol.lower()}-port chooses another"
        raise OSError(
            f"cannot listen on {bracketed(host)}:{port} ({protocol}): {reason}"
        ) from error
    return sock


def _keep_others_away(bound: socket.socket) -> None:
    """Prevents other servers from binding the port of ``bound``, which does not listen.

    With SO_REUSEADDR a socket may bind and listen although connections of the previous server are
    in TIME_WAIT, which lasts a minute. Without the option on ``bound`` no other socket may bind the
    port.
    """
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def _reserve(claimed: socket.socket) -> socket.socket:
    """Returns a socket on the port of ``claimed``, bound while ``claimed`` still keeps other
    servers away."""
    claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved = _bind_shared(claimed)
    _keep_others_away(reserved)
    return reserved


def _bind_shared(other: socket.socket) -> socket.socket:
    """Returns a socket that shares the port of ``other``."""
    sock = socket.socket(other.family, socket.SOCK_STREAM)
    try:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind(other.getsockname())
    except OSError:
        sock.close()
        raise
    return sock
