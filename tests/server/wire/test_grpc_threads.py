"""What grpcio's threads hand to the event loop: asks, windows, and streams while draining."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import grpc
import numpy as np
import pytest
from server.fake_engine import FakeEngine
from server.live import IN_THREAD, make_service
from server.waiting import until

from embedserve.models.models import Service
from embedserve.wire.grpc_asks import Ask, LoopDoor
from embedserve.wire.grpc_server import EmbeddingService
from embedserve.wire.grpc_threads import ThreadStreamReader, ThreadWindow
from embedserve_proto import embedding_pb2 as pb


def body_for(user: int) -> bytes:
    return pb.EmbedRequest(keys=["user"], ids=[user], lengths=[1]).SerializeToString()


def user_vector(body: bytes) -> list[float]:
    return np.frombuffer(pb.EmbedResponse.FromString(body).values, "<f4")[:4].tolist()


def handed(door: LoopDoor, user: int) -> Ask:
    ask = door.new_ask(body_for(user), None)
    door.hand(ask)
    return ask


class Aborted(Exception):
    pass


class Context:
    """What the handlers ask of a call's context."""

    def __init__(self, *, is_active: bool = True) -> None:
        self._is_active = is_active
        self.callbacks: list[Callable[[], None]] = []

    def time_remaining(self) -> None:
        return None

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.callbacks.append(callback)
        return self._is_active

    def set_trailing_metadata(self, metadata: object) -> None:
        pass

    def abort(self, code: grpc.StatusCode, message: str) -> NoReturn:
        raise Aborted(f"{code.name}: {message}")


def embedding_of(service: Service) -> EmbeddingService:
    return EmbeddingService(service, LoopDoor(service, asyncio.get_running_loop()))


async def test_many_threads_are_answered_from_one_batch(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    service = make_service(engine, executor=executor)
    door = LoopDoor(service, asyncio.get_running_loop())
    asks = [handed(door, user) for user in range(5)]
    assert engine.lookups == []
    for user, ask in enumerate(asks):
        await asyncio.to_thread(ask.wait)
        assert user_vector(ask.answer_body) == engine.tables["t_user"][user].tolist()
    assert [lookup.batch_size for lookup in engine.lookups] == [5]
    assert dict(service.metrics.protocols["grpc"].outcomes) == {"OK": 5}


async def test_a_call_that_ended_before_its_handler_began_costs_no_lookup(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    service = make_service(engine, executor=executor)
    embedding = embedding_of(service)
    gone = Context(is_active=False)
    assert await asyncio.to_thread(embedding.embed, body_for(1), gone) == b""  # type: ignore[arg-type]
    assert engine.lookups == []
    assert dict(service.metrics.protocols["grpc"].outcomes) == {"CANCELLED": 1}


async def test_an_error_in_encoding_is_that_requests_alone(
    engine: FakeEngine,
    executor: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from embedserve.wire import grpc_asks

    encode = grpc_asks.protobuf_codec.encode_result
    results: list[object] = []

    def fail_once(result: object) -> bytes:
        results.append(result)
        if len(results) == 1:
            raise ValueError("cannot be encoded")
        return encode(result)  # type: ignore[arg-type]

    monkeypatch.setattr(grpc_asks.protobuf_codec, "encode_result", fail_once)
    service = make_service(engine, executor=executor)
    door = LoopDoor(service, asyncio.get_running_loop())
    first, second = handed(door, 1), handed(door, 2)
    for ask in (first, second):
        await asyncio.to_thread(ask.wait)
    assert first.error is not None
    assert first.error.code == "INTERNAL"
    assert "cannot be encoded" in caplog.text
    assert user_vector(second.answer_body) == engine.tables["t_user"][2].tolist()


async def test_a_stream_that_begins_during_the_drain_is_ended(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    embedding = embedding_of(make_service(engine, executor=executor))
    end = threading.Event()

    def bodies() -> Iterator[bytes]:
        end.wait()
        yield body_for(1)

    embedding.drain()
    with pytest.raises(Aborted, match="UNAVAILABLE: draining before the stop"):
        await asyncio.to_thread(list, embedding.embed_stream(bodies(), Context()))  # type: ignore[arg-type]
    end.set()
    await asyncio.sleep(0.02)
    assert engine.lookups == []


async def test_a_request_that_comes_during_the_drain_is_not_taken(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    engine.hold()
    embedding = embedding_of(make_service(engine, executor=executor, limits=IN_THREAD))
    end = threading.Event()

    def bodies() -> Iterator[bytes]:
        yield body_for(1)
        end.wait()
        yield body_for(2)

    stream = embedding.embed_stream(bodies(), Context())  # type: ignore[arg-type]
    answer = asyncio.ensure_future(asyncio.to_thread(next, stream))
    await until(lambda: engine.lookups)
    embedding.drain()
    end.set()
    await asyncio.sleep(0.02)
    engine.release()
    assert user_vector(await answer) == engine.tables["t_user"][1].tolist()
    with pytest.raises(Aborted, match="UNAVAILABLE"):
        await asyncio.to_thread(next, stream)
    assert len(engine.lookups) == 1


async def test_a_read_that_is_cut_off_closes_the_window(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    service = make_service(engine, executor=executor)
    window = ThreadWindow()

    def bodies() -> Iterator[bytes]:
        yield body_for(1)
        raise ConnectionError("as grpcio ends the reading of a call that was cancelled")

    reader = ThreadStreamReader(service, LoopDoor(service, asyncio.get_running_loop()), window)
    await asyncio.to_thread(reader.read, bodies(), lambda: None)
    assert window.is_closed
    assert not window.is_complete
    first = window.first()
    assert first is not None
    await asyncio.to_thread(first.wait)
    assert user_vector(first.answer_body) == engine.tables["t_user"][1].tolist()
