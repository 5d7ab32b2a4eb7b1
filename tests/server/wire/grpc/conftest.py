"""Fixtures of the gRPC tests: a pipeline, a client over it, and an engine that is held."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from server.fake_engine import FakeEngine
from server.live import make_pipeline
from server.wire.grpc.grpc_peer import BODY_MAX, GrpcPeer

from embedserve.config import Limits
from embedserve.pipeline import RequestPipeline


@pytest.fixture
def pipeline(engine: FakeEngine, executor: ThreadPoolExecutor) -> RequestPipeline:
    limits = Limits(body_bytes_max=BODY_MAX, inline_bytes_max=0)
    return make_pipeline(engine, executor=executor, limits=limits)


@pytest.fixture
async def peer(pipeline: RequestPipeline) -> GrpcPeer:
    return GrpcPeer(pipeline)


@pytest.fixture
def held_engine(engine: FakeEngine) -> Iterator[FakeEngine]:
    engine.hold()
    yield engine
    engine.release()
