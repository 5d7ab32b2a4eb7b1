"""Fixtures of the tests that run over every protocol; the tests of a module share servers."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from event_loop import pytest_asyncio_loop_factories
from protocols.drivers import PROTOCOLS, Driver
from protocols.servers import Servers
from server.waiting import given_up_after

__all__ = ["pytest_asyncio_loop_factories"]
TEST_S_MAX = 120


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


@pytest_asyncio.fixture(loop_scope="module")
async def driver(request: pytest.FixtureRequest, servers: Servers, protocol: str) -> Driver:
    """Returns a driver of the protocol, for a server with SETUP of the test's module."""
    return await servers.driver(protocol, request.module.SETUP)
