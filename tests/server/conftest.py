"""Fixtures: the fake engine, a batcher and servers over it, stores, and a time limit for tests."""

from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from server.fake_engine import FakeEngine, model_info
from server.gate import Gate
from server.live import Live, live_server, make_pipeline
from server.raw_http import OurServer, http_client
from server.small_store import TWO_RANKS, publish_small_model
from server.waiting import given_up_after

from embedserve.batching.batcher import Batcher
from embedserve.config import Limits
from embedserve.metrics.model_metrics import ModelMetrics
from embedserve.pipeline import RequestPipeline

MakeBatcher = Callable[[Limits], Batcher]
TEST_S_MAX = 120
"""Seconds until a test counts as hung.

Some tests need 11 s of CPU time, and a busy machine may give them a sixth of a core.
"""


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    with given_up_after(TEST_S_MAX):
        yield


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture
def engine(executor: ThreadPoolExecutor) -> Iterator[FakeEngine]:
    """Yields a fake engine. Releases it at the end, so that no test leaves the thread waiting."""
    engine = FakeEngine()
    yield engine
    engine.release()


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Yields a gate. Opens it at the end, so that no test leaves a thread waiting."""
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture
def metrics(engine: FakeEngine) -> ModelMetrics:
    return ModelMetrics(engine.model)


@pytest.fixture
def make_batcher(
    engine: FakeEngine, metrics: ModelMetrics, executor: ThreadPoolExecutor
) -> MakeBatcher:
    return lambda limits: Batcher(engine, engine.model, limits, metrics, executor)


@pytest.fixture
def limits(request: pytest.FixtureRequest) -> Limits:
    """Returns LIMITS of the test's module, or small limits if the module has none."""
    small = Limits(body_bytes_max=1000, request_examples_max=8)
    limits: Limits = getattr(request.module, "LIMITS", small)
    return limits


@pytest.fixture
def pipeline(engine: FakeEngine, executor: ThreadPoolExecutor, limits: Limits) -> RequestPipeline:
    return make_pipeline(engine, executor=executor, limits=limits)


@pytest.fixture
async def rest(pipeline: RequestPipeline) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(pipeline) as client:
        yield client


@pytest.fixture
async def server(pipeline: RequestPipeline) -> AsyncIterator[OurServer]:
    """Yields an HTTP server over ``pipeline`` with small socket buffers."""
    async with OurServer(pipeline) as server:
        yield server


@pytest.fixture
def grpc_server() -> str:
    """Name of the server that handles gRPC. Modules that test the gRPC contract parametrize it."""
    return "native"


@pytest.fixture
async def live(engine: FakeEngine, limits: Limits, grpc_server: str) -> AsyncIterator[Live]:
    """Yields a whole server over ``engine``, and clients of the server."""
    films = FakeEngine(model_info("films", {"user": (7, 2)}), seed=1)
    async with live_server(engine, films, limits=limits, grpc_server=grpc_server) as live:
        yield live


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a store with one small model. Another process publishes it, so this process imports
    no torch."""
    return publish_small_model(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def two_rank_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a store with one small model whose plan has two ranks."""
    return publish_small_model(tmp_path_factory.mktemp("two-rank-store"), *TWO_RANKS)
