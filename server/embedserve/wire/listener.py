"""Listener on a port or a Unix socket: accepts a bounded number of connections per iteration.

libuv accepts one connection in each event-loop iteration, and an iteration of a busy server takes
milliseconds. The last of a few hundred clients that connect at once would wait for seconds. All
waiting connections at once, on the other hand, would delay the responses to open ones, and one
worker would get a whole connection pool where workers share a socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

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
        self._loop.add_reader(self._sock, self._accept)

    async def close(self) -> None:
        """Stops accepting. Waits for accepted connections until their protocols are connected."""
        if self._retrying is not None:
            self._retrying.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        if self._opening:
            await asyncio.wait(self._opening)

    def _accept(self) -> None:
        for _ in range(self._accepts_max):
            try:
                accepted, _ = self._sock.accept()
            except ConnectionAbortedError:
                continue
            except BlockingIOError:  # none is left, or another worker accepted it
                return
            except OSError:  # such as too many open files, which the server logs
                self._loop.remove_reader(self._sock)
                self._retrying = self._loop.call_later(RETRY_S, self.start)
                return
            self._open(accepted)

    def _open(self, accepted: socket.socket) -> None:
        opening = self._loop.create_task(
            self._loop.connect_accepted_socket(self._new_connection, accepted)
        )
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
