"""Tests of threads: a thread that cannot start does not count as running."""

import contextlib
import gc
from weakref import ref

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


async def test_objects_of_failed_work_are_freed_without_garbage_collection() -> None:
    class Rows:
        pass

    made: list[ref[Rows]] = []

    def fail() -> None:
        rows = Rows()
        made.append(ref(rows))
        raise ValueError("no more rows")

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            await run_in_daemon_thread("work", fail)
        await until(lambda: made[0]() is None)
    finally:
        gc.enable()
