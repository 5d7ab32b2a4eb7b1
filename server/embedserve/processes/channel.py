"""Channel between the supervisor and a worker: each message is a line, in both directions."""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections import deque
from collections.abc import Callable

READ_BYTES = 1 << 16


class LineSocket:
    """One end of a channel, as a stream socket. Lines that the other end has not read are queued,
    and sent in order."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._unsent: deque[memoryview] = deque()
        self._is_begun = False
        self._received = b""

    def queue(self, line: bytes, *, replaces: bool = False) -> None:
        """Queues ``line``. If it ``replaces`` earlier ones, those not begun to be sent are
        dropped."""
        while replaces and len(self._unsent) > self._is_begun:
            self._unsent.pop()
        self._unsent.append(memoryview(line + b"\n"))

    def flush(self) -> bool:
        """Sends what is queued; returns False if the other end has to read first."""
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent[0])
            except BlockingIOError:
                return False
            except OSError:  # the other end is gone; receive() tells
                self._unsent.clear()
                break
            rest = self._unsent[0][sent:]
            self._is_begun = bool(rest)
            if rest:
                self._unsent[0] = rest
            else:
                self._unsent.popleft()
        return True

    def receive(self) -> list[bytes] | None:
        """Returns lines that have arrived, [] if there are none yet, or None at the end of the
        channel."""
        while True:
            try:
                read = self.sock.recv(READ_BYTES)
            except BlockingIOError:
                return []
            except ConnectionResetError:  # the other end had not read all; its lines come next
                continue
            if not read:
                return None
            *lines, self._received = (self._received + read).split(b"\n")
            if lines:
                return lines


class SupervisorChannel:
    """The supervisor's end. Only the newest message matters, so an unsent one is replaced.

    START, which releases a new worker, is sent before any other message.
    """

    def __init__(
        self, sock: socket.socket, selector: selectors.BaseSelector, on_readable: Callable[[], None]
    ) -> None:
        """
        Args:
            selector: selector whose registered callbacks are called with their events.
            on_readable: called when there is a message to receive.
        """
        sock.setblocking(False)
        self._lines = LineSocket(sock)
        self._selector = selector
        self._on_readable = on_readable
        self.receive = self._lines.receive
        selector.register(sock, selectors.EVENT_READ, self._on_events)

    def send(self, message: bytes) -> None:
        self._lines.queue(message, replaces=True)
        self._flush()

    def end(self) -> None:
        """Unregisters and closes the channel of a worker that exits."""
        self._selector.unregister(self._lines.sock)
        self.close()

    def close(self) -> None:
        """Closes only the socket, because a forked process shares its parent's selector."""
        self._lines.sock.close()

    def _on_events(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if events & selectors.EVENT_READ:
            self._on_readable()

    def _flush(self) -> None:
        events = selectors.EVENT_READ
        if not self._lines.flush():
            events |= selectors.EVENT_WRITE
        self._selector.modify(self._lines.sock, events, self._on_events)


class WorkerChannel:
    """The worker's end. It blocks until ``attach``, which moves it onto the event loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._lines = LineSocket(sock)
        self._early: list[bytes] = []

    def send(self, message: bytes) -> None:
        self._lines.queue(message)
        self._flush()

    def wait_for_message(self) -> bytes | None:
        """Returns the next message, or None if the supervisor is gone. Only before ``attach``."""
        while not self._early:
            lines = self._lines.receive()
            if lines is None:
                return None
            self._early += lines
        return self._early.pop(0)

    def attach(self, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """Calls ``on_message`` with each message from now on, and ``on_end`` once the supervisor is
        gone."""
        sock, loop = self._lines.sock, asyncio.get_running_loop()
        sock.setblocking(False)

        def receive() -> None:
            # Reads until there is nothing more: after an error of the socket uvloop does not call
            # again, not even for its end.
            while lines := self._lines.receive():
                for line in lines:
                    on_message(line)
            if lines is None:
                loop.remove_reader(sock)
                on_end()

        for line in self._early:
            on_message(line)
        loop.add_reader(sock, receive)

    def _flush(self) -> None:
        if not self._lines.flush():
            asyncio.get_running_loop().add_writer(self._lines.sock, self._flush_later)

    def _flush_later(self) -> None:
        if self._lines.flush():
            asyncio.get_running_loop().remove_writer(self._lines.sock)
