"""The event loop of servers in tests; a conftest.py imports its hook."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop


@pytest.hookimpl(optionalhook=True)  # hosts of the GPU tests may lack pytest-asyncio
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Returns uvloop's event loop, which the server uses in production.

    asyncio leaves Nagle's algorithm on, which delays responses, and accepts each connection in a
    task. Before Python 3.12.9 and 3.13.2 its transports do not pause a writer in ``writelines``
    (CVE-2024-12254).
    """
    return {"uvloop": uvloop.new_event_loop}
