"""Claims the two ports before anything is loaded, so that one in use is said at once.

A claimed port listens: of two servers that start together the second is refused. Connections
that come while the models load wait until they are served.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

BACKLOG = 4096


@dataclass(frozen=True)
class Ports:
    """The claimed ports of one server; the numbers are real also where 0 was asked for."""

    host: str
    http: int
    grpc: int
    http_socket: socket.socket
    grpc_socket: socket.socket

    def release_grpc(self) -> str:
        """The address (HOST:PORT) for grpcio, which binds by itself and does so at once."""
        self.grpc_socket.close()
        return f"{bracketed(self.host)}:{self.grpc}"

    def close(self) -> None:
        self.http_socket.close()
        self.grpc_socket.close()


def claim_ports(host: str, http_port: int, grpc_port: int) -> Ports:
    """Listens on both ports.

    Raises:
        OSError: one of them is in use, or the address is not this host's; names it.
    """
    http_socket = _listen(host, http_port, "HTTP")
    try:
        grpc_socket = _listen(host, grpc_port, "gRPC")
    except OSError:
        http_socket.close()
        raise
    http, grpc = (sock.getsockname()[1] for sock in (http_socket, grpc_socket))
    return Ports(host, http, grpc, http_socket, grpc_socket)


def _listen(host: str, port: int, protocol: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        raise OSError(
            f"cannot listen on {bracketed(host)}:{port} ({protocol}): {reason}"
        ) from error
    return sock


def bracketed(host: str) -> str:
    """``host`` as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
