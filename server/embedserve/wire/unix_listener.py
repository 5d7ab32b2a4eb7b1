"""Listener on a Unix socket that all workers of a server share.

A worker accepts one connection in each event-loop iteration. libuv accepts all waiting connections
at once. One worker would then get a client's whole connection pool.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

RETRY_S = 1.0
"""Seconds before accepting is retried after an error such as too many open files."""


class UnixListener:
    """Accept loop of a Unix socket, from ``start`` to ``close``.

    Attributes:
        is_waiting: whether accepting is paused after an error, for lack of descriptors or memory.
    """

    def __init__(self, sock: socket.socket, new_connection: Callable[[], asyncio.Protocol]) -> None:
        """
        Args:
            sock: socket that is bound and listening; ``close`` closes it.
            new_connection: factory of the protocol of an accepted connection.
        """
        self._sock = sock
        self._new_connection = new_connection
        self._loop = asyncio.get_running_loop()
        self._retrying: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[object]] = set()

    @property
    def is_waiting(self) -> bool:
        return self._retrying is not None

    def start(self) -> None:
        self._sock.setblocking(False)
        self._retrying = None
        self._loop.add_reader(self._sock, self._accept)

    def close(self) -> None:
        if self._retrying is not None:
            self._retrying.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):  # another worker accepted it
            return
        except OSError:  # such as too many open files, which the server logs
            self._loop.remove_reader(self._sock)
            self._retrying = self._loop.call_later(RETRY_S, self.start)
            return
        opening = self._loop.create_task(
            self._loop.connect_accepted_socket(self._new_connection, accepted)
        )
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
