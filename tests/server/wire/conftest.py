"""Servers of these tests run on uvloop, as they do for users."""

from __future__ import annotations

import asyncio

import pytest
import uvloop


@pytest.fixture(scope="session")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """uvloop's. The transports of asyncio do not pause a writer in ``writelines`` before Python
    3.12.9 and 3.13.2 (CVE-2024-12254), and accept connections in tasks of their own."""
    policy: asyncio.AbstractEventLoopPolicy = uvloop.EventLoopPolicy()
    return policy
