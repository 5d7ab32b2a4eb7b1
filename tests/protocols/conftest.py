"""Every test here runs over every protocol; servers are shared by the tests of a module."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
import uvloop
from protocols.drivers import PROTOCOLS
from protocols.servers import Servers
from server.waiting import given_up_after

TEST_S_MAX = 60


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    with given_up_after(TEST_S_MAX):
        yield


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        yield Servers(tmp_path_factory.mktemp("shm"), stack)


@pytest.fixture(scope="session")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """uvloop's, as served: asyncio leaves Nagle's algorithm on, which holds responses up."""
    policy: asyncio.AbstractEventLoopPolicy = uvloop.EventLoopPolicy()
    return policy
