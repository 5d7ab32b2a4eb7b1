"""Tests of forking: a failed fork leaves no descriptors, a process that hangs is ended, the end of
a process is described, and restarts have delays."""

import errno
import logging
import os
import signal
import socket
from typing import NoReturn

import pytest

from embedserve.processes.forked import LAST_WORDS_S, HangWatch, Restarts, describe_exit, fork


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


def test_error_of_a_signal_handler_during_a_fork_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pids: list[int] = []
    real_fork = os.fork

    def fork_with_signal() -> int:
        if pid := real_fork():
            pids.append(pid)
            signal.raise_signal(signal.SIGHUP)
        return pid

    def interrupt(*_: object) -> NoReturn:
        raise InterruptedError

    def wait(channel: socket.socket) -> int:
        return len(channel.recv(1))

    monkeypatch.setattr(os, "fork", fork_with_signal)
    before = signal.signal(signal.SIGHUP, interrupt)
    try:
        with pytest.raises(InterruptedError):
            fork(wait, lambda: None)
    finally:
        signal.signal(signal.SIGHUP, before)
    with pytest.raises(ChildProcessError):
        os.waitpid(pids[0], os.WNOHANG)


def test_process_that_hangs_is_aborted_and_soon_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    watch = HangWatch("it", logging.getLogger())
    assert not watch.check(7, 8.0, 10.0, 100.0)
    watch.on_heartbeat()
    assert not watch.check(7, 8.0, 10.0, 108.0)
    assert not watch.check(7, 2.0, 10.0, 110.0)
    assert watch.check(7, 1.0, 10.0, 111.0)
    assert sent == [(7, signal.SIGABRT)]
    assert caplog.messages == ["it (process 7) hangs: no heartbeat for 11 s; it is ended"]
    watch.on_heartbeat()  # too late
    for now_s in (111.0 + LAST_WORDS_S / 2, 111.0 + LAST_WORDS_S):
        assert not watch.check(7, 20.0, 10.0, now_s)
    assert sent == [(7, signal.SIGABRT), (7, signal.SIGKILL)]
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("exit_code", "how"),
    [
        (3, "ended with exit code 3"),
        (-signal.SIGKILL, "was ended by SIGKILL"),
        (-35, "was ended by signal 35"),
    ],
)
def test_end_of_a_process_is_described_by_exit_code_or_signal(exit_code: int, how: str) -> None:
    assert describe_exit(exit_code) == how


def test_restart_delay_grows_to_its_limit_and_stays_there() -> None:
    restarts = Restarts()
    delays_s = [restarts.schedule(0.0, was_ready=True) for _ in range(2000)]
    assert delays_s[:8] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert set(delays_s[8:]) == {30}
