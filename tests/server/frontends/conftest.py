"""A service over the fake engine, and an HTTP client of its REST frontend without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from server.fake_engine import FakeEngine
from server.live import make_service

from embedserve.config import Limits
from embedserve.frontends.management import management_app
from embedserve.frontends.rest import EmbedEndpoint
from embedserve.service import Service


@pytest.fixture
def limits() -> Limits:
    return Limits(body_bytes_max=1000, request_examples_max=8)


@pytest.fixture
def service(engine: FakeEngine, executor: ThreadPoolExecutor, limits: Limits) -> Service:
    return make_service(engine, executor=executor, limits=limits)


@pytest.fixture
async def rest(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    app = EmbedEndpoint(service, management_app(service))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
