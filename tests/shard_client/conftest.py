"""Fixtures of connections to shards: uvloop, like in a router, and longer timeouts."""

import pytest
from event_loop import pytest_asyncio_loop_factories

from embedserve.shard_client import shard_connection

__all__ = ["pytest_asyncio_loop_factories"]

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def longer_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes timeouts longer, for shards on a busy host, unless the test is about timeouts."""
    for name in ("CONNECT_S_MAX", "PING_S_MAX"):
        monkeypatch.setattr(shard_connection, name, PATIENCE_S)
