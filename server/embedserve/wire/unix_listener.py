"""Accepts the connections of a Unix socket, which all workers of a server share.

One in each turn of the event loop: what takes all that wait at once, as libuv does, takes those of
the other workers, too, and a client's pool of connections is then one worker's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

RETRY_S = 1.0
"""Before another try where a connection could not be taken."""


class UnixListener:
    """Listens from its start to its close.

    Attributes:
        is_waiting: whether there was no descriptor, or no memory, for a connection.
    """

    def __init__(self, sock: socket.socket, new_connection: Callable[[], asyncio.Protocol]) -> None:
        """
        Args:
            sock: which is bound and listens; closed at the end.
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
        except (BlockingIOError, ConnectionAbortedError):  # another worker was first
            return
        except OSError:  # such as too many open files, which the server says
            self._loop.remove_reader(self._sock)
            self._retrying = self._loop.call_later(RETRY_S, self.start)
            return
        opening = self._loop.create_task(
            self._loop.connect_accepted_socket(self._new_connection, accepted)
        )
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
