"""A service over the fake engine, and an HTTP client of its REST frontend without a network; the
same over gRPC, by grpcio in this process or by pyvoy in an Envoy that all tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from server.channels import OWN_CONNECTION
from server.envoy_server import Envoy, RemoteEngine, RemoteLive, reset, running_envoy
from server.fake_engine import FakeEngine, model_info
from server.live import Live, live_server, make_service

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


@pytest.fixture(scope="session")
def envoy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Envoy]:
    with running_envoy(tmp_path_factory.mktemp("envoy")) as envoy:
        yield envoy


@pytest.fixture(params=["grpcio", "pyvoy"])
def either_engine(request: pytest.FixtureRequest, limits: Limits) -> Iterator[FakeEngine]:
    """The engine behind the one gRPC server or the other."""
    if request.param == "pyvoy":
        engine: FakeEngine = reset(request.getfixturevalue("envoy"), limits)
    else:
        engine = FakeEngine()
    yield engine
    engine.release()


@pytest.fixture
async def either_live(
    either_engine: FakeEngine, limits: Limits
) -> AsyncIterator[Live | RemoteLive]:
    """The gRPC server over that engine, and clients of it."""
    if isinstance(either_engine, RemoteEngine):
        async with grpc.aio.insecure_channel(
            either_engine.envoy.target, options=OWN_CONNECTION
        ) as channel:
            yield RemoteLive(either_engine.envoy, channel)
    else:
        films = FakeEngine(model_info("films", {"user": (7, 2)}), seed=1)
        async with live_server(either_engine, films, limits=limits) as live:
            yield live
