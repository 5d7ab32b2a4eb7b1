"""A log that never waits for its reader: what a full pipe does not take is dropped and counted.

Event loops and the supervisor write the log themselves. There is no thread in this, so that the
supervisor can fork for as long as it lives, and what was written is out, however a process ends.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import socket
import stat
import sys
import threading
from typing import TextIO

ATOMIC_BYTES = 4096
"""Of one write: Linux's PIPE_BUF, which a pipe takes whole or not at all."""
DROPPED = "%d lines of the log were dropped: its reader did not keep up"


class LogStream(io.TextIOBase):
    """Writes text to the file of another stream, without ever waiting for its reader.

    A line is written whole or dropped; of one that was begun the rest comes before the next line.

    Attributes:
        dropped_lines: by this process, and by those that it was forked from.
    """

    def __init__(self, stream: TextIO) -> None:
        """Raises OSError or ValueError: ``stream`` has no file."""
        super().__init__()
        self._stream = stream
        self._fd = stream.fileno()
        self._fd_opened = -1
        self._socket: socket.socket | None = None
        self._polled: select.poll | None = None
        self._lock = threading.RLock()  # a signal's handler may write within a write
        self._rest = b""
        self.dropped_lines = 0
        mode = os.fstat(self._fd).st_mode
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(self._fd))
        elif stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            self._open_again()

    def _open_again(self) -> None:
        """Opens the pipe or terminal once more: O_NONBLOCK on the file as it is would be that of
        all processes that have it."""
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
        try:
            self._fd = self._fd_opened = os.open(f"/proc/self/fd/{self._fd}", flags)
        except OSError:  # such as a terminal of another user: written to only while it takes more
            self._polled = select.poll()
            self._polled.register(self._fd, select.POLLOUT)

    @property
    def encoding(self) -> str:  # type: ignore[override]  # an attribute there
        return self._stream.encoding or "utf-8"

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Closes what this stream has opened; the other stream stays open."""
        if self._socket is not None:
            self._socket.close()
        if self._fd_opened >= 0:
            os.close(self._fd_opened)
            self._fd_opened = -1
        super().close()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode(self.encoding, "backslashreplace")
        with self._lock:
            self.flush()
            if not self._rest:
                left = self._write_now(data)
                if len(left) < len(data):
                    self._rest = left
                    data = b""
            if data:
                self.dropped_lines += max(1, data.count(b"\n"))
        return len(text)

    def flush(self) -> None:
        """Writes what is left of a line, as far as it can be written now."""
        with self._lock:
            self._rest = self._write_now(self._rest)

    def _write_now(self, data: bytes) -> bytes:
        """Writes what the file takes now of ``data``; returns the rest."""
        try:
            while data:
                if self._polled is not None and not self._polled.poll(0):
                    break
                piece = data[:ATOMIC_BYTES]
                if self._socket is not None:
                    count = self._socket.send(piece, socket.MSG_DONTWAIT)
                else:
                    count = os.write(self._fd, piece)
                data = data[count:]
        except OSError:  # it takes no more now, or for ever
            pass
        return data


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes the log; behind the first line that gets out after others were dropped it logs how
    many those were."""

    _told_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        before = dropped_lines()
        super().emit(record)
        if self._told_dropped < before == dropped_lines():
            count, self._told_dropped = before - self._told_dropped, before
            super().emit(
                logging.LogRecord(__name__, logging.WARNING, __file__, 0, DROPPED, (count,), None)
            )


def dropped_lines() -> int:
    """Lines that this process did not get out on its stdout and stderr."""
    return sum(getattr(stream, "dropped_lines", 0) for stream in (sys.stdout, sys.stderr))


def unblock_output() -> None:
    """Has nothing that this process, and those it forks, writes to sys.stdout and sys.stderr wait
    for a reader."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, LogStream):
            continue
        with contextlib.suppress(AttributeError, OSError, ValueError):  # it is no file, or none
            stream.flush()
            setattr(sys, name, LogStream(stream))
