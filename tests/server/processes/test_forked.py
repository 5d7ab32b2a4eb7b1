"""A process that cannot be forked leaves nothing behind."""

from __future__ import annotations

import errno
import os
import signal
import socket
from typing import NoReturn

import pytest

from embedserve.processes.forked import fork


def test_a_fork_that_fails_leaves_no_descriptor_and_no_blocked_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = socket.socketpair()

    def fail() -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(socket, "socketpair", lambda: pair)
    monkeypatch.setattr(os, "fork", fail)
    with pytest.raises(BlockingIOError):
        fork(lambda channel: 0, lambda: None)
    assert [one.fileno() for one in pair] == [-1, -1]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
