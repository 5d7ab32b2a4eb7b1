"""Tests of threads: a thread that cannot start does not count as running."""

from __future__ import annotations

import pytest
from server.thread_limit import refuse_thread
from server.waiting import until

from embedserve.processes.threads import is_any_running, run_in_daemon_thread


async def test_one_that_cannot_be_started_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_thread(monkeypatch, "work")
    with pytest.raises(BlockingIOError, match="can't start new thread"):
        await run_in_daemon_thread("work", lambda: 7)
    assert not is_any_running()
    assert await run_in_daemon_thread("work", lambda: 7) == 7
    await until(lambda: not is_any_running())
