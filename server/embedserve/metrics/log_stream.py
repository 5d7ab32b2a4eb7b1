"""Non-blocking log output: lines that a full pipe cannot take are dropped and counted.

The event loops and the supervisor write the log themselves. No thread is used, so that the
supervisor can fork at any time, and nothing already written is lost, however a process ends.
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
"""Bytes of a write that a pipe takes whole or not at all: PIPE_BUF on Linux. Longer lines are
written in part where a pipe is nearly full."""
DROPPED = "%d lines of the log were dropped: its reader did not keep up"


class LogStream(io.TextIOBase):
    """Text stream that writes to the file of another stream and never waits for its reader.

    A line is written whole or dropped, once it ends. print and tracebacks pass it in pieces, and
    other processes would write between these. The rest of a partly written line comes before the
    next line.

    Attributes:
        dropped_lines: number of lines dropped by this process and by the processes it was forked
            from.
    """

    def __init__(self, stream: TextIO) -> None:
        """Raises OSError or ValueError if ``stream`` has no file descriptor."""
        super().__init__()
        self._stream = stream
        self._fd = stream.fileno()
        self._fd_opened = -1
        self._socket: socket.socket | None = None
        self._polled: select.poll | None = None
        self._lock = threading.RLock()  # reentrant: a signal handler may write during a write
        self._rest = b""
        self._unfinished = b""  # line without its end
        self.dropped_lines = 0
        mode = os.fstat(self._fd).st_mode
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(self._fd))
        elif stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            self._open_again()

    def _open_again(self) -> None:
        """Reopens the pipe or terminal in non-blocking mode. O_NONBLOCK on the inherited descriptor
        would apply to every process that shares it."""
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
        try:
            self._fd = self._fd_opened = os.open(f"/proc/self/fd/{self._fd}", flags)
        except OSError:  # such as another user's terminal: polled before each write instead
            self._polled = select.poll()
            self._polled.register(self._fd, select.POLLOUT)

    @property
    def encoding(self) -> str:  # type: ignore[override]  # an attribute in io.TextIOBase
        return self._stream.encoding or "utf-8"

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Closes the descriptors that this stream opened; the wrapped stream stays open."""
        self.flush()
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
        with self._lock:
            before, self._unfinished = self._unfinished, b""
            data = before + text.encode(self.encoding, "backslashreplace")
            end = data.rfind(b"\n") + 1 if len(data) <= ATOMIC_BYTES else len(data)
            self._unfinished = data[end:]
            self._write_or_drop(data[:end])
        return len(text)

    def flush(self) -> None:
        """Writes the rest of a partly written line and a line without its end, as far as the file
        takes them without blocking."""
        with self._lock:
            data, self._unfinished = self._unfinished, b""
            self._write_or_drop(data)

    def _write_or_drop(self, data: bytes) -> None:
        self._rest = self._write_now(self._rest)
        if data and not self._rest:
            left = self._write_now(data)
            if len(left) < len(data):
                self._rest = left
                data = b""
        if data:
            self.dropped_lines += max(1, data.count(b"\n"))

    def _write_now(self, data: bytes) -> bytes:
        """Writes as much of ``data`` as the file takes without blocking; returns the rest. It
        writes all at once, because other processes would write between pieces of a line."""
        try:
            while data:
                if self._socket is not None:
                    count = self._socket.send(data, socket.MSG_DONTWAIT)
                elif self._polled is None:
                    count = os.write(self._fd, data)
                elif self._polled.poll(0):
                    count = os.write(self._fd, data[:ATOMIC_BYTES])  # more could block
                else:
                    break
                data = data[count:]
        except OSError:  # the file takes no more for now, or its reader is gone
            pass
        return data


class LogHandler(logging.StreamHandler[TextIO]):
    """Log handler that reports dropped lines. After the first line that gets through again, it logs
    how many were dropped."""

    _reported_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        before = dropped_lines()
        super().emit(record)
        if self._reported_dropped < before == dropped_lines():
            count = (before - self._reported_dropped,)
            super().emit(
                logging.LogRecord(__name__, logging.WARNING, __file__, 0, DROPPED, count, None)
            )
            if dropped_lines() == before:
                self._reported_dropped = before


def dropped_lines() -> int:
    """Returns the number of lines that this process could not write to its stdout and stderr."""
    return sum(getattr(stream, "dropped_lines", 0) for stream in (sys.stdout, sys.stderr))


def unblock_output() -> None:
    """Makes sys.stdout and sys.stderr non-blocking for this process and for the processes it
    forks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, LogStream):
            continue
        # The stream may be None or have no file descriptor.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
            setattr(sys, name, LogStream(stream))
