"""Listener on a port or a Unix socket: accepts a bounded number of connections per iteration.

libuv accepts one connection in each event-loop iteration, and an iteration of a busy server takes
milliseconds. The last of a few hundred clients that connect at once would wait for seconds. All
waiting connections at once, on the other hand, would delay the responses to open ones, and one
worker would get a whole connection pool where workers share a socket.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that wait on a socket to be accepted, at most."""
RETRY_S = 1.0
"""Seconds before accepting is retried after an error such as too many open files."""


class Listener:
    """Accept loop of a socket, from ``start`` to ``close``.

    Attributes:
        is_waiting: whether accepting is paused after an error, for lack of descriptors or memory.
    """

    def __init__(
        self,
        sock: socket.socket,
        new_connection: Callable[[], asyncio.Protocol],
        accepts_max: int = 1,
    ) -> None:
        """
        Args:
            sock: socket that is bound and listening; ``close`` closes it.
            new_connection: factory of the protocol of an accepted connection.
            accepts_max: maximum number of connections accepted in an event-loop iteration.
        """
        self._sock = sock
        self._new_connection = new_connection
        self._accepts_max = accepts_max
        self._loop = asyncio.get_running_loop()
        self._retrying: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[object]] = set()

    @property
    def is_waiting(self) -> bool:
        return self._retrying is not None

    def start(self) -> None:
        self._sock.setblocking(False)
        self._retrying = None
        self._loop.add_reader(self._sock, self._on_readable)

    async def close(self, waiting_max: int) -> None:
        """Stops accepting. Waits for accepted connections until their protocols are connected.

        Args:
            waiting_max: maximum number of connections in the kernel's queue that are accepted
                first, as their clients may have sent requests. A socket that workers share keeps
                receiving connections.
        """
        if self._retrying is not None:
            self._retrying.cancel()
        self._loop.remove_reader(self._sock)
        try:
            self._accept(waiting_max)
        except OSError as error:  # such as too many open files
            logger.warning("connections that wait are refused: %s", error)
        self._sock.close()
        if self._opening:
            await asyncio.wait(self._opening)

    def _on_readable(self) -> None:
        try:
            self._accept(self._accepts_max)
        except OSError:  # such as too many open files, which the server logs
            self._loop.remove_reader(self._sock)
            self._retrying = self._loop.call_later(RETRY_S, self.start)

    def _accept(self, count: int) -> None:
        """Accepts at most ``count`` connections. Raises OSError."""
        for _ in range(count):
            try:
                accepted, _ = self._sock.accept()
            except ConnectionAbortedError:
                continue
            except BlockingIOError:  # none is left, or another worker accepted it
                return
            self._open(accepted)

    def _open(self, accepted: socket.socket) -> None:
        opening = self._loop.create_task(
            self._loop.connect_accepted_socket(self._new_connection, accepted)
        )
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
