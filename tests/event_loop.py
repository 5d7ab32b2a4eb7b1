"""The event loop of servers in tests, which a conftest imports."""

from __future__ import annotations

import asyncio

import pytest
import uvloop


@pytest.fixture(scope="session")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """uvloop's, as served. asyncio leaves Nagle's algorithm on, which holds responses up, and
    accepts connections in tasks of their own. Its transports do not pause a writer in
    ``writelines`` before Python 3.12.9 and 3.13.2 (CVE-2024-12254)."""
    policy: asyncio.AbstractEventLoopPolicy = uvloop.EventLoopPolicy()
    return policy
