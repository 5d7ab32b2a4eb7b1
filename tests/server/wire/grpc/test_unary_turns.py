"""Tests of calls without a lookup: few per event-loop iteration, and models described once."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from grpc_reflection.v1alpha import reflection_pb2
from server.fake_engine import FakeEngine
from server.live import make_pipeline
from server.wire.grpc.grpc_peer import GrpcPeer

from embedserve import open_inference_service
from embedserve.wire.grpc import open_inference_grpc
from embedserve.wire.grpc.calls import PLAIN_WORK
from embedserve.wire.grpc.grpc_framing import framed
from embedserve.wire.grpc.open_inference_grpc import SERVICE_NAME as OPEN_INFERENCE
from embedserve.wire.grpc.reflection import SERVICE_NAMES
from embedserve.wire.grpc.service import SERVICE_NAME
from embedserve.wire.http2.turns import WORK_PER_TURN
from embedserve_proto import open_inference_pb2 as pb

COUNT = 100


@pytest.fixture
async def peer(engine: FakeEngine, executor: ThreadPoolExecutor) -> GrpcPeer:
    return GrpcPeer(make_pipeline(engine, executor=executor))


def calls(peer: GrpcPeer, path: str, message: bytes) -> bytes:
    """Returns the frames of COUNT calls."""
    return b"".join(peer.call_bytes(one, path, framed(message)) for one in range(1, 2 * COUNT, 2))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"/{SERVICE_NAME}/ListModels", b""),
        (
            f"/{OPEN_INFERENCE}/ModelMetadata",
            pb.ModelMetadataRequest(name="shop").SerializeToString(),
        ),
        (f"/{OPEN_INFERENCE}/ModelStatistics", b""),
        (f"/{OPEN_INFERENCE}/RepositoryIndex", b""),
    ],
)
async def test_one_iteration_answers_a_bounded_number_of_calls(
    peer: GrpcPeer, path: str, message: bytes
) -> None:
    calls_per_iteration_max = WORK_PER_TURN // PLAIN_WORK + 1
    peer.connection.receive(calls(peer, path, message))
    iterations = 1
    while peer.connection.has_more:
        peer.take()
        peer.connection.receive(b"")
        iterations += 1
    assert iterations >= COUNT // calls_per_iteration_max
    peer.take()
    assert {peer.status(number)[0] for number in range(1, 2 * COUNT, 2)} == {0}


async def test_one_iteration_answers_a_bounded_number_of_reflection_messages(
    peer: GrpcPeer,
) -> None:
    """Requests the list of services, as all of its responses fit into the stream's window."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    responses_per_iteration_max = WORK_PER_TURN // PLAIN_WORK + 1
    messages = framed(request.SerializeToString()) * COUNT
    peer.call(1, f"/{SERVICE_NAMES[0]}/ServerReflectionInfo", messages)
    counts = [0]
    while 1 not in peer.trailers:
        counts.append(len(peer.messages(1)))
        await asyncio.sleep(0)
        peer.take()
    counts.append(len(peer.messages(1)))
    assert max(after - before for before, after in pairwise(counts)) <= responses_per_iteration_max
    assert len(peer.messages(1)) == COUNT


async def test_model_descriptions_are_built_once_per_version(
    peer: GrpcPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = []
    model_metadata = open_inference_service.model_metadata

    def count(*arguments: Any) -> object:
        described.append(arguments)
        return model_metadata(*arguments)

    for module in (open_inference_service, open_inference_grpc):
        monkeypatch.setattr(module, "model_metadata", count)
    for number, version in ((1, ""), (3, ""), (5, "7")):
        request = pb.ModelMetadataRequest(name="shop", version=version)
        peer.call(number, f"/{OPEN_INFERENCE}/ModelMetadata", framed(request.SerializeToString()))
        response = pb.ModelMetadataResponse.FromString(peer.messages(number)[0])
        assert (response.name, list(response.versions)) == ("shop", ["7"])
        assert len(response.inputs) == 6
    for number in (7, 9):
        configuration = pb.ModelConfigRequest(name="shop")
        peer.call(
            number, f"/{OPEN_INFERENCE}/ModelConfig", framed(configuration.SerializeToString())
        )
        assert pb.ModelConfigResponse.FromString(peer.messages(number)[0]).config.name == "shop"
    assert len(described) == 2
