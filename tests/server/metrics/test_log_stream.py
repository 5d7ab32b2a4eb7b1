"""Tests of the log stream: lines are written whole or dropped and counted, to every kind of
file."""

import fcntl
import io
import logging
import os
import pty
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast
from unittest.mock import Mock

import pytest

from embedserve.metrics.log_stream import ATOMIC_BYTES, LogHandler, LogStream

LINE = "a line of the log, with words\n"
Ends = tuple[int, int]


def pipe() -> Ends:
    return os.pipe()


def unix_socket() -> Ends:
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


def terminal() -> Ends:
    return pty.openpty()


def pipe_of_another_user() -> Ends:
    return os.pipe()


@pytest.mark.parametrize("make", [pipe, unix_socket, terminal, pipe_of_another_user])
def test_unread_lines_are_dropped_and_counted(
    make: Callable[[], Ends], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = make()
    if make is pipe_of_another_user:
        monkeypatch.setattr(os, "open", Mock(side_effect=PermissionError))
    with os.fdopen(writing, "w") as file:
        stream = LogStream(file)
        kept: list[str] = []
        in_a_row = 0
        while in_a_row < 10:  # a full terminal takes more lines once the kernel has moved some on
            before = stream.dropped_lines
            stream.write(f"{len(kept)} {LINE}")
            if stream.dropped_lines == before:
                kept.append(f"{len(kept)} {LINE}")
                in_a_row = 0
            else:
                assert stream.dropped_lines == before + 1
                in_a_row += 1
        assert not fcntl.fcntl(writing, fcntl.F_GETFL) & os.O_NONBLOCK  # others share the file
        read = b""
        while read.count(b"\n") < len(kept):
            read += os.read(reading, 1 << 16)
            stream.flush()
        assert read.decode().replace("\r\n", "\n") == "".join(kept)
        stream.write("again\n")
        assert os.read(reading, 100).decode().strip() == "again"
    os.close(reading)


def test_line_longer_than_the_pipe_is_written_whole() -> None:
    reading, writing = os.pipe()
    line = "x" * 300_000 + "\n"
    with os.fdopen(writing, "w") as file, os.fdopen(reading, "rb", 0) as reader:
        stream = LogStream(file)
        stream.write(line)
        stream.write("dropped\n")
        read = b""
        while len(read) < len(line):
            read += reader.read(1 << 16)
            stream.flush()
        stream.write("next\n")
        assert read.decode() == line
        assert reader.read(100) == b"next\n"
        assert stream.dropped_lines == 1


def test_long_line_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that workers, which share the file, cannot write between pieces of a line, such as one
    in JSON with a traceback."""
    line, write = "x" * 5 * ATOMIC_BYTES + "\n", os.write
    sizes: list[int] = []

    def note(fd: int, data: bytes) -> int:
        sizes.append(len(data))
        return write(fd, data)

    monkeypatch.setattr(os, "write", note)
    reading, writing = os.pipe()
    for file in (os.fdopen(writing, "w"), (tmp_path / "log").open("w")):
        with file:
            LogStream(file).write(line)
    os.close(reading)
    assert sizes == [len(line), len(line)]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, theirs.makefile("w") as file:
        LogStream(file).write(line)
        assert ours.recv(1 << 16).decode() == line


def test_lines_to_a_closed_pipe_are_dropped_without_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        stream = LogStream(file)
        stream.write("one\ntwo\n")
        assert stream.dropped_lines == 2


def test_lines_are_written_at_the_position_of_a_shared_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        os.write(file.fileno(), b"before\n")
        stream = LogStream(file)
        stream.write("ours \udc80\n")
        os.write(file.fileno(), b"after\n")
    assert path.read_text() == "before\nours \\udc80\nafter\n"


def test_line_printed_in_pieces_is_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        stream = LogStream(file)
        print("ours", 1, "\nand", end="", file=stream)
        os.write(file.fileno(), b"theirs\n")
        print(" more", file=stream)
        print("no end", end="", file=stream, flush=True)
    assert path.read_text() == "ours 1 \ntheirs\nand more\nno end"


def test_long_line_is_not_kept_until_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        stream = LogStream(file)
        for _ in range(ATOMIC_BYTES + 1):
            stream.write("x")
        assert path.read_text() == "x" * (ATOMIC_BYTES + 1)


def test_writing_starts_no_thread() -> None:
    reading, writing = os.pipe()
    before = {*threading.enumerate()}
    with os.fdopen(writing, "w") as file:
        LogStream(file).write(LINE)
        assert {*threading.enumerate()} <= before
    os.close(reading)


@contextmanager
def logging_to_a_pipe(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[logging.Logger, LogStream, io.RawIOBase]]:
    """Yields a logger, the stream of its handler, which is stderr, and the pipe's reader."""
    reading, writing = os.pipe()
    logger = logging.getLogger(name)
    logger.propagate = False
    with os.fdopen(writing, "w") as file, os.fdopen(reading, "rb", 0) as reader:
        stream = LogStream(file)
        monkeypatch.setattr(sys, "stderr", stream)
        logger.addHandler(handler := LogHandler(cast(TextIO, stream)))
        try:
            yield logger, stream, reader
        finally:
            logger.removeHandler(handler)


def test_number_of_dropped_lines_is_logged_with_the_next_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with logging_to_a_pipe("stalled", monkeypatch) as (logger, stream, reader):
        while not stream.dropped_lines:
            logger.warning("x" * 1000)
        logger.warning("x" * 1000)
        reader.read(1 << 20)
        logger.warning("out")
        lines_read = reader.read(1 << 20).decode().splitlines()
        logger.warning("and out")
        assert reader.read(1 << 20) == b"and out\n"
    assert lines_read[-2:] == ["out", "2 lines of the log were dropped: its reader did not keep up"]


def test_number_of_dropped_lines_is_logged_again_if_its_line_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with logging_to_a_pipe("almost stalled", monkeypatch) as (logger, stream, reader):
        pipe_bytes = fcntl.fcntl(stream.fileno(), fcntl.F_GETPIPE_SZ)
        while stream.dropped_lines < 5:
            logger.warning("x" * 1000)
        reader.read(pipe_bytes)
        # Another process leaves room for one more line.
        os.write(stream.fileno(), b"y" * (pipe_bytes - len("out\n")))
        logger.warning("out")
        assert reader.read(pipe_bytes).endswith(b"yout\n")
        logger.warning("and out")
        lines_read = reader.read(pipe_bytes).decode().splitlines()
    assert lines_read == [
        "and out",
        "6 lines of the log were dropped: its reader did not keep up",
    ]
