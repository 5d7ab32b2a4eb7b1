"""Tests of forking: a failed fork leaves no descriptors, the end of a process is described, and
restarts have delays."""

import errno
import os
import signal
import socket
from typing import NoReturn

import pytest

from embedserve.processes.forked import Restarts, described, fork


def test_failed_fork_leaves_no_descriptors_and_no_blocked_signals(
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


@pytest.mark.parametrize(
    ("exit_code", "how"),
    [
        (3, "ended with exit code 3"),
        (-signal.SIGKILL, "was ended by SIGKILL"),
        (-35, "was ended by signal 35"),
    ],
)
def test_end_of_a_process_is_described_by_exit_code_or_signal(exit_code: int, how: str) -> None:
    assert described(exit_code) == how


def test_restart_delay_grows_to_its_limit_and_stays_there() -> None:
    restarts = Restarts()
    delays_s = [restarts.schedule(0.0, was_ready=True) for _ in range(2000)]
    assert delays_s[:8] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert set(delays_s[8:]) == {30}
