"""Tests of SIGTERM under load: no client of any kind loses a request, in any of many drains.

Each complete request gets a response, or a sign that the server did not accept it. That sign is
"connection: close" in the response before it, a refused connection, or UNAVAILABLE over gRPC.
"""

import asyncio
import random
import signal
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field

import grpc
import pytest
from server.channels import OWN_CONNECTION
from server.processes.test_drain import BODY, REQUEST, server_process
from server.raw_http import post, read_response
from server.waiting import until

from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

DRAINS = 3
SOAK_DRAINS = 100
CLIENTS = 4
PIPELINED = 8
LOOKUP_S = 0.002
ANSWERS_MIN = 200
"""Minimum number of responses before the drain, of all kinds together."""
CLIENT_S_MAX = 60
pytestmark = pytest.mark.usefixtures("warm")

REJECTION_DETAILS = ("draining before the stop", "Connection refused", "GOAWAY")


@dataclass
class Outcomes:
    """Results of the clients of one drain.

    Attributes:
        responses: number of responses by kind and client.
        lost: descriptions of the requests without a response.
    """

    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)


async def send_over_http(port: int, pipelined: int, number: int, outcomes: Outcomes) -> None:
    """Sends requests over one connection after another, until the server accepts no more."""
    kind = f"HTTP/1.1, {pipelined} at once"
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return
        is_last = False
        while not is_last:
            left = pipelined
            try:
                writer.write(post(BODY) * pipelined)
                while left and not is_last:
                    status, headers, _ = await read_response(reader)
                    assert status == 200
                    left -= 1
                    is_last = headers.get(b"connection") == b"close"
                    outcomes.responses[kind, number] += 1
            except (OSError, asyncio.IncompleteReadError) as error:
                outcomes.lost.append(f"{kind}: {error!r}")
                is_last = True
            else:
                if left:
                    outcomes.lost.append(f"{kind}: {left} of {pipelined} after 'connection: close'")
        writer.close()


async def send_unary_calls(target: str, number: int, outcomes: Outcomes) -> None:
    async with grpc.aio.insecure_channel(target, options=OWN_CONNECTION) as channel:
        stub = EmbeddingServiceStub(channel)
        while True:
            try:
                assert (await stub.Embed(REQUEST)).batch_size == 1
            except grpc.aio.AioRpcError as error:
                if not _is_rejected_by_drain(error):
                    outcomes.lost.append(f"unary: {error.code().name} {error.details()}")
                return
            outcomes.responses["unary", number] += 1


def send_over_stream(target: str, number: int, outcomes: Outcomes) -> None:
    """Keeps some requests in flight. It runs in a thread, because a write to a stream that has just
    ended makes grpc.aio report INTERNAL."""
    slots, is_over = threading.Semaphore(PIPELINED), threading.Event()

    def requests() -> Iterator[pb.EmbedRequest]:
        while slots.acquire() and not is_over.is_set():
            yield REQUEST

    with grpc.insecure_channel(target, options=OWN_CONNECTION) as channel:
        try:
            for answer in EmbeddingServiceStub(channel).EmbedStream(requests()):
                assert answer.batch_size == 1
                outcomes.responses["stream", number] += 1
                slots.release()
        except grpc.RpcError as error:
            if error.details() != "draining before the stop":
                outcomes.lost.append(f"stream: {error.code().name} {error.details()}")
        finally:
            is_over.set()
            slots.release()


def _is_rejected_by_drain(error: grpc.aio.AioRpcError) -> bool:
    details = error.details() or ""
    return error.code() is grpc.StatusCode.UNAVAILABLE and any(
        one in details for one in REJECTION_DETAILS
    )


async def run_drain(seed: int) -> Outcomes:
    """Runs one server under load from its start to its end."""
    outcomes = Outcomes()
    async with server_process("native", LOOKUP_S) as server:
        http_port, target = server.http.base_url.port, server.target
        assert http_port is not None
        loads: list[Coroutine[None, None, None]] = []
        for number in range(CLIENTS):
            loads += [send_over_http(http_port, n, number, outcomes) for n in (1, PIPELINED)]
            loads += [
                send_unary_calls(target, number, outcomes),
                asyncio.to_thread(send_over_stream, target, number, outcomes),
            ]
        clients = [asyncio.create_task(one) for one in loads]
        # Each client has a response, too: a stream that began after the drain would count as lost.
        await until(
            lambda: (
                outcomes.responses.total() >= ANSWERS_MIN
                and len(outcomes.responses) == len(clients)
            )
        )
        await asyncio.sleep(random.Random(seed).random() * 0.05)  # any moment of a batch
        server.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(asyncio.gather(*clients), CLIENT_S_MAX)
        assert await server.wait_stopped() == 0
    return outcomes


@pytest.mark.parametrize("seed", range(DRAINS))
async def test_drain_under_load_loses_no_request(seed: int) -> None:
    assert (await run_drain(seed)).lost == []


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(DRAINS, SOAK_DRAINS))
async def test_hundred_drains_under_load_lose_no_request(seed: int) -> None:
    assert (await run_drain(seed)).lost == []
