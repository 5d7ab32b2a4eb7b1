"""Connections of these tests run on uvloop, as a router's do, and wait longer."""

from __future__ import annotations

import pytest
from event_loop import event_loop_policy

from embedserve.shard_client import shard_connection

__all__ = ["event_loop_policy"]

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard on a busy host may take its time, unless the test is about that."""
    for name in ("CONNECT_S_MAX", "PING_S_MAX"):
        monkeypatch.setattr(shard_connection, name, PATIENCE_S)
