"""Tests of the file reloader: it reads failed files again, even if no process writes to them."""

import asyncio
import errno
import logging
import math
import os
from pathlib import Path

import pytest
from server.gate import Gate
from server.waiting import until

from embedserve import file_reloader
from embedserve.file_reloader import FileReloader, poll_all


class WatchedFile:
    """A file that a FileReloader follows, and what the reloader has read.

    Attributes:
        fault: exception that the next reads raise; None if they succeed.
        reads: number of reads so far.
        adopted: values so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fault: Exception | None = None
        self.reads = 0
        self.adopted: list[str] = []
        path.write_text("first")
        self.reloader = FileReloader("tokens", [str(path)], self._read, self.adopted.append)

    def _read(self) -> str:
        self.reads += 1
        if self.fault is not None:
            raise self.fault
        if not self.path.stat().st_mode & 0o004:  # as root could read the file
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.path))
        return self.path.read_text()


@pytest.fixture
def watched(tmp_path: Path) -> WatchedFile:
    return WatchedFile(tmp_path / "tokens")


@pytest.mark.parametrize(
    "fault", [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), ValueError("not yet valid")]
)
async def test_failed_read_is_retried_though_the_file_is_unchanged(
    watched: WatchedFile,
    fault: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(file_reloader, "RETRY_S", 0.0)
    watched.path.write_text("without the revoked one")
    watched.fault = fault
    for _ in range(3):
        await watched.reloader.poll()
    assert watched.adopted == ["first"]
    watched.fault = None
    await watched.reloader.poll()
    assert watched.adopted == ["first", "without the revoked one"]
    assert caplog.messages == [
        f"tokens: {fault}; what was read before stays in use",
        "tokens: read again, and right",
    ]
    await watched.reloader.poll()
    assert watched.reads == 5  # the first read, three that failed, and one that succeeded


async def test_invalid_file_is_not_read_at_every_poll(
    watched: WatchedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reloader, "RETRY_S", math.inf)
    watched.path.write_text("invalid")
    watched.fault = ValueError("line 1")
    for _ in range(3):
        await watched.reloader.poll()
    assert watched.reads == 2


async def test_a_file_that_becomes_readable_is_read_at_the_next_poll(
    watched: WatchedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reloader, "RETRY_S", math.inf)
    watched.path.write_text("second")
    watched.path.chmod(0o600)
    await watched.reloader.poll()
    assert watched.adopted == ["first"]
    before = watched.path.stat().st_ctime_ns
    while watched.path.stat().st_ctime_ns == before:  # the kernel's clock has ticks
        watched.path.chmod(0o644)
    await watched.reloader.poll()
    assert watched.adopted == ["first", "second"]


async def test_hanging_file_holds_up_no_other_and_not_the_end(
    watched: WatchedFile, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reloader, "POLL_S", 0.01)
    other = WatchedFile(tmp_path / "certificates")
    monkeypatch.setattr(other.reloader, "_read", gate.before(lambda: "late"))
    other.path.write_text("second")
    polling = asyncio.create_task(poll_all([other.reloader, watched.reloader]))
    await until(lambda: gate.threads)
    watched.path.write_text("without the revoked one")
    await until(lambda: len(watched.adopted) > 1)
    assert [thread.daemon for thread in gate.threads] == [True]  # the process may end
    gate.opened.set()
    await until(lambda: len(other.adopted) > 1)
    polling.cancel()
