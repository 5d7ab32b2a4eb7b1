"""The event loop policy of servers in tests; a conftest.py imports it."""

import asyncio

import pytest
import uvloop


@pytest.fixture(scope="session")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """Returns uvloop's policy, which the server uses in production.

    asyncio leaves Nagle's algorithm on, which delays responses, and accepts each connection in a
    task. Before Python 3.12.9 and 3.13.2 its transports do not pause a writer in ``writelines``
    (CVE-2024-12254).
    """
    policy: asyncio.AbstractEventLoopPolicy = uvloop.EventLoopPolicy()
    return policy
