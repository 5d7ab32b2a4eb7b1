"""A system that cannot start another thread."""

import threading

import pytest


def make_thread_start_fail(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes the next start of a thread fail whose name begins with ``name``."""
    start = threading.Thread.start

    def fail_once(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            monkeypatch.setattr(threading.Thread, "start", start)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
