"""Fixtures of the wire tests: the servers run on uvloop, as they do for users."""

from event_loop import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
