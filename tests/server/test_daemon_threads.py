"""Tests of threads: a thread that cannot start does not count as running."""

import pytest
from server.thread_limit import make_thread_start_fail
from server.waiting import until

from embedserve.daemon_threads import is_any_running, run_in_daemon_thread


async def test_thread_that_cannot_start_does_not_count_as_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_thread_start_fail(monkeypatch, "work")
    with pytest.raises(BlockingIOError, match="can't start new thread"):
        await run_in_daemon_thread("work", lambda: 7)
    assert not is_any_running()
    assert await run_in_daemon_thread("work", lambda: 7) == 7
    await until(lambda: not is_any_running())
