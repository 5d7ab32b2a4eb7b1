"""A system that has no thread left."""

from __future__ import annotations

import threading

import pytest


def refuse_thread(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Lets the next start of a thread whose name begins with ``name`` fail."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            monkeypatch.setattr(threading.Thread, "start", start)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
