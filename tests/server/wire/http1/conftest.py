"""Fixtures of the HTTP/1 tests: a server whose lookups run in a thread."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from server.fake_engine import FakeEngine
from server.live import IN_THREAD, make_pipeline
from server.raw_http import OurServer


@pytest.fixture
async def threaded_server(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> AsyncIterator[OurServer]:
    """Runs a server that looks up in a thread, where the engine can be held."""
    pipeline = make_pipeline(engine, executor=executor, limits=IN_THREAD)
    async with OurServer(pipeline) as server:
        yield server
