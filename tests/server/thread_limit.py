"""A system that cannot start another thread."""

from __future__ import annotations

import threading

import pytest


def refuse_thread(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes the next start of a thread fail whose name begins with ``name``."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            monkeypatch.setattr(threading.Thread, "start", start)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
