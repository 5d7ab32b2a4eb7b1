"""Channel between the supervisor and a worker: each message is a line, in both directions."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
from collections.abc import AsyncIterator, Callable

READ_BYTES = 1 << 16


class SupervisorChannel:
    """The supervisor's end. Only the newest message matters, so an unsent one is replaced."""

    def __init__(
        self, sock: socket.socket, selector: selectors.BaseSelector, on_readable: Callable[[], None]
    ) -> None:
        """
        Args:
            selector: selector whose registered callbacks are called with their events.
            on_readable: called when there is a message to receive.
        """
        sock.setblocking(False)
        self._sock = sock
        self._selector = selector
        self._on_readable = on_readable
        self._begun = memoryview(b"")  # the rest of a message that is sent in part
        self._next = b""
        self._received = b""
        selector.register(sock, selectors.EVENT_READ, self._on_events)

    def send(self, message: bytes) -> None:
        self._next = message + b"\n"
        self._flush()

    def receive(self) -> list[bytes] | None:
        """Returns messages that have arrived, [] if there are none yet, or None at the end of the
        channel."""
        while True:
            try:
                read = self._sock.recv(READ_BYTES)
            except BlockingIOError:
                return []
            except ConnectionResetError:  # the other end had not read all; its lines come next
                continue
            if not read:
                return None
            *lines, self._received = (self._received + read).split(b"\n")
            if lines:
                return lines

    def end(self) -> None:
        """Unregisters and closes the channel of a worker that exits."""
        self._selector.unregister(self._sock)
        self.close()

    def close(self) -> None:
        """Closes only the socket, because a forked process shares its parent's selector."""
        self._sock.close()

    def _on_events(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if events & selectors.EVENT_READ:
            self._on_readable()

    def _flush(self) -> None:
        """Sends what the worker has room for, and the rest once it has read."""
        events = selectors.EVENT_READ
        try:
            while self._begun or self._next:
                if not self._begun:
                    self._begun, self._next = memoryview(self._next), b""
                self._begun = self._begun[self._sock.send(self._begun) :]
        except BlockingIOError:
            events |= selectors.EVENT_WRITE
        except OSError:  # the other end is gone, which receive() returns
            self._begun, self._next = memoryview(b""), b""
        self._selector.modify(self._sock, events, self._on_events)


async def messages(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yields the supervisor's complete messages to a worker, until the supervisor is gone."""
    # A supervisor that ends without reading all messages causes an OSError.
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            yield await reader.readuntil()


async def deliver(received: AsyncIterator[bytes], on_message: Callable[[bytes], None]) -> None:
    """Calls ``on_message`` with each message. The event loop logs an error that it raises, and the
    next messages are delivered nevertheless."""
    loop = asyncio.get_running_loop()
    async for message in received:
        loop.call_soon(on_message, message)
