"""Tests of the request pipeline: load shedding before decoding, deadlines, counts and flushes."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter

import pytest
from server.codecs import JSON, PROTOBUF
from server.fake_engine import FakeEngine, model_info
from server.live import make_pipeline
from server.recording_call import (
    BODY,
    SECRET,
    RecordingCall,
    RecordingWriter,
    ask,
    asked,
    expect_internal,
    fail,
    metrics_of,
    outcomes,
)
from server.waiting import until

from embedserve.codec.codec import Codec
from embedserve.config import Limits
from embedserve.errors import DeadlineExceededError, OverloadedError
from embedserve.lookup_types import LookupRequest, ResponseChunks
from embedserve.pipeline import RequestOptions, RequestPipeline
from embedserve.pipeline.telemetry import RequestTelemetry
from embedserve.tracing.request_id import HeaderList
from embedserve_proto import embedding_pb2 as pb

BAD = b'{"features": {"user": [99]}}'
LIMITS = Limits(inline_bytes_max=0, queue_examples_max=1)
LARGE_LIMITS = Limits(inline_bytes_max=2000, queue_examples_max=1, request_values_max=1 << 20)
"""Limits with which a request of 200 ids is large."""


@pytest.fixture
def other() -> FakeEngine:
    return FakeEngine(model_info("films", {"user": (7, 2)}), seed=1)


@pytest.fixture
def pipeline(
    engine: FakeEngine, other: FakeEngine, executor: ThreadPoolExecutor, limits: Limits
) -> RequestPipeline:
    return make_pipeline(engine, other, executor=executor, limits=limits)


@pytest.fixture
async def full(pipeline: RequestPipeline, engine: FakeEngine) -> AsyncIterator[RequestPipeline]:
    """Returns a pipeline whose default model "shop" has a full queue; the queue of "films" is
    open."""
    engine.hold()
    running = ask(pipeline)
    await until(lambda: engine.lookups)
    waiting = ask(pipeline)
    assert isinstance(ask(pipeline).error, OverloadedError)
    assert outcomes(pipeline) == {"RESOURCE_EXHAUSTED": 1}
    yield pipeline
    engine.release()
    await until(lambda: running.told and waiting.told)


def undecodable(decoded: list[bytes], codec: Codec) -> Codec:
    """Returns ``codec`` with a decoder that appends each body to ``decoded``."""

    def try_decode_inline(body: bytes, model: str, limits: Limits) -> LookupRequest | None:
        decoded.append(body)
        return codec.try_decode_inline(body, model, limits)

    return replace(codec, try_decode_inline=try_decode_inline)


def bodies(codec: Codec, *bags: list[int]) -> Sequence[bytes]:
    """Returns a request for each bag."""
    if codec is JSON:
        return [json.dumps({"features": {"user": bag}}).encode() for bag in bags]
    messages = [pb.EmbedRequest(keys=["user"], ids=bag, lengths=[len(bag)]) for bag in bags]
    return [message.SerializeToString() for message in messages]


def ask_each(pipeline: RequestPipeline, codec: Codec, *bodies: bytes) -> list[RecordingCall]:
    calls = [RecordingCall(pipeline, asked(pipeline, codec)) for _ in bodies]
    for call, body in zip(calls, bodies, strict=True):
        pipeline.submit(call, body)
    return calls


async def test_while_its_model_is_full_a_request_is_refused_undecoded(
    full: RequestPipeline,
) -> None:
    decoded: list[bytes] = []
    for model in ("", "shop"):
        call = RecordingCall(full, asked(full, undecodable(decoded, JSON), model=model))
        full.submit(call, b"not decoded, so not said to be wrong")
        assert isinstance(call.error, OverloadedError)
        assert call.error.message == "the queue of 'shop' is full: it holds 1 examples and 1 ids"
    assert decoded == []
    assert outcomes(full) == {"RESOURCE_EXHAUSTED": 3}


async def test_while_one_model_is_full_another_answers(
    full: RequestPipeline, other: FakeEngine
) -> None:
    call = ask(full, model="films")
    await until(lambda: call.told)
    assert isinstance(call.told[0], bytes)
    assert len(other.lookups) == 1


@pytest.mark.parametrize(("named", "is_refused"), [("films", False), ("shop", True), ("", True)])
async def test_the_model_that_a_message_names_decides_whether_it_is_refused_undecoded(
    full: RequestPipeline, named: str, is_refused: bool
) -> None:
    decoded: list[bytes] = []
    call = RecordingCall(full, asked(full, undecodable(decoded, PROTOBUF)))
    message = pb.EmbedRequest(model=named, keys=["user"], ids=[1], lengths=[1])
    full.submit(call, message.SerializeToString())
    await until(lambda: call.told)
    assert bool(decoded) != is_refused
    assert isinstance(call.told[0], OverloadedError) == is_refused


@pytest.mark.parametrize("codec", [JSON, PROTOBUF])
async def test_while_the_queue_for_large_requests_is_full_they_are_refused_undecoded(
    engine: FakeEngine, executor: ThreadPoolExecutor, codec: Codec
) -> None:
    body, large, huge = bodies(codec, [1], [1] * 200, [1] * 400_000)
    pipeline = make_pipeline(engine, executor=executor, limits=LARGE_LIMITS)
    engine.hold()
    answered = ask_each(pipeline, codec, large)
    await until(lambda: engine.lookups)
    answered += ask_each(pipeline, codec, large)
    (refused,) = ask_each(pipeline, codec, large)
    assert "holds 1 examples; 1 more would exceed" in refused.error.message
    told = "the queue of 'shop' for large requests is full: it holds 1 examples and 200 ids"
    decoded: list[bytes] = []
    watched = replace(undecodable(decoded, codec), decode=fail)
    undecoded = ask_each(pipeline, watched, large, huge)
    await until(lambda: all(call.told for call in undecoded))  # the last one in the thread
    assert [call.error.message for call in undecoded] == [told, told]
    assert large not in decoded  # a large request is not even decoded in the thread
    (small,) = ask_each(pipeline, watched, body)
    await until(lambda: small.told)
    assert isinstance(small.told[0], bytes)
    assert decoded[-1] == body
    engine.release()
    await until(lambda: all(call.told for call in answered))
    assert outcomes(pipeline) == {"OK": 3, "RESOURCE_EXHAUSTED": 3}


async def test_what_waits_to_be_decoded_is_refused_undecoded_once_its_queue_is_full(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    large, huge = bodies(JSON, [1] * 200, [1] * 400_000)
    pipeline = make_pipeline(engine, executor=executor, limits=LARGE_LIMITS)
    engine.hold()
    gate = threading.Event()

    def decode(body: bytes, model: str, limits: Limits) -> LookupRequest:
        gate.wait()
        return JSON.decode(body, model, limits)

    (decoded,) = ask_each(pipeline, replace(JSON, decode=decode), huge)
    (waits,) = ask_each(pipeline, replace(JSON, decode=fail), huge)
    answered = ask_each(pipeline, JSON, large)
    await until(lambda: engine.lookups)
    answered += ask_each(pipeline, JSON, large)
    (refused,) = ask_each(pipeline, JSON, large)
    assert isinstance(refused.error, OverloadedError)
    gate.set()
    await until(lambda: waits.told)
    assert decoded.error.message == waits.error.message
    assert "for large requests is full" in waits.error.message
    engine.release()
    await until(lambda: all(call.told for call in answered))
    assert outcomes(pipeline) == {"OK": 2, "RESOURCE_EXHAUSTED": 3}


async def test_what_names_a_full_model_is_refused_before_its_body_has_come(
    full: RequestPipeline,
) -> None:
    call = RecordingCall(full, asked(full, model="shop"))
    full.reject_if_overloaded(call)
    assert isinstance(call.error, OverloadedError)
    assert not call.is_waiting
    assert outcomes(full) == {"RESOURCE_EXHAUSTED": 2}
    for model in ("", "films", "nobody"):
        call = RecordingCall(full, asked(full, model=model))
        full.reject_if_overloaded(call)
        assert call.told == []
        assert call.is_waiting
    assert outcomes(full) == {"RESOURCE_EXHAUSTED": 2}


async def test_nothing_is_refused_early_while_there_is_room(pipeline: RequestPipeline) -> None:
    call = RecordingCall(pipeline, asked(pipeline, model="shop"))
    pipeline.reject_if_overloaded(call)
    assert (call.told, outcomes(pipeline)) == ([], {})


async def test_room_is_told_when_the_queue_has_some_again(
    pipeline: RequestPipeline, engine: FakeEngine
) -> None:
    told: list[bool] = []
    pipeline.on_queue_reopened(lambda: told.append(not pipeline.models.has_full_queue))
    engine.hold()
    first = ask(pipeline)
    await until(lambda: engine.lookups)
    second = ask(pipeline)
    ask(pipeline)
    assert (told, pipeline.models.has_full_queue) == ([], True)
    engine.release()
    await until(lambda: first.told and second.told)
    assert told == [True]


async def test_the_deadline_counts_from_the_start(
    pipeline: RequestPipeline, engine: FakeEngine
) -> None:
    decoded: list[bytes] = []
    wanted = asked(pipeline, undecodable(decoded, JSON), timeout_s=500.0)
    late = RecordingCall(pipeline, wanted, perf_counter() - 510)
    pipeline.submit(late, BODY)
    assert isinstance(late.error, DeadlineExceededError)
    told = "the deadline had passed when the request was read, "
    assert late.error.message.startswith(told)
    # The time counts from the start of the request, not from the deadline. The range allows for a
    # test that takes up to a minute.
    assert 510_000 <= float(late.error.message.removeprefix(told).split()[0]) < 570_000
    assert decoded == []
    assert outcomes(pipeline) == {"DEADLINE_EXCEEDED": 1}
    in_time = RecordingCall(pipeline, wanted, perf_counter() - 100)
    pipeline.submit(in_time, BODY)
    await until(lambda: in_time.told)
    assert isinstance(in_time.told[0], bytes)
    assert len(engine.lookups) == 1


async def test_slow_requests_that_were_refused_are_among_the_slowest(
    pipeline: RequestPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pipeline.telemetry = RequestTelemetry(slow_ms=100_000)
    ask(pipeline, b"{")
    assert pipeline.telemetry.slow.fields() == []
    late = RecordingCall(pipeline, asked(pipeline, timeout_s=5.0), perf_counter() - 110)
    pipeline.submit(late, BODY)
    (slow,) = pipeline.telemetry.slow.fields()
    assert slow["outcome"] == "DEADLINE_EXCEEDED"
    assert 110_000 <= slow["total_ms"] < 170_000
    # Each request has only the line that every rejected request has.
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "refused with INVALID_ARGUMENT",
        "refused with DEADLINE_EXCEEDED",
    ]


async def test_an_unforeseen_error_in_decoding_is_answered_in_general(
    pipeline: RequestPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    call = RecordingCall(pipeline, asked(pipeline, replace(JSON, try_decode_inline=fail)))
    pipeline.submit(call, BODY)
    expect_internal(call, caplog)
    assert outcomes(pipeline) == {"INTERNAL": 1}


async def test_an_unforeseen_error_in_reading_a_messages_model_is_answered_in_general(
    full: RequestPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    call = RecordingCall(full, asked(full, replace(PROTOBUF, peek_model=fail)))
    full.submit(call, b"")
    expect_internal(call, caplog)


async def test_an_answer_that_cannot_be_encoded_fails_alone(
    engine: FakeEngine, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = make_pipeline(engine, executor=executor)
    wanted = RequestOptions(
        "", JSON, replace(PROTOBUF, try_encode_inline=fail), None, metrics_of(pipeline)
    )
    others = (RecordingCall(pipeline, one) for one in (wanted, asked(pipeline)))
    neighbours = [ask(pipeline), *others]
    for call in neighbours[1:]:
        pipeline.submit(call, BODY)
    await until(lambda: all(call.told for call in neighbours))
    assert len(engine.lookups) == 1
    expect_internal(neighbours[1], caplog)
    assert isinstance(neighbours[0].told[0], bytes)
    assert neighbours[0].told == neighbours[2].told
    assert outcomes(pipeline) == {"OK": 2, "INTERNAL": 1}


async def test_an_answer_that_cannot_be_written_fails_alone(
    engine: FakeEngine, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = make_pipeline(engine, executor=executor)
    first, second = (RecordingCall(pipeline, asked(pipeline)) for _ in range(2))
    first.writer.failure = ZeroDivisionError(SECRET)
    for call in (first, second):
        pipeline.submit(call, BODY)
    await until(lambda: first.told and second.told)
    expect_internal(first, caplog)
    assert isinstance(second.told[0], bytes)
    assert outcomes(pipeline) == {"OK": 1, "INTERNAL": 1}


class Output:
    """Collects the written responses, and how many of them each flush has."""

    def __init__(self) -> None:
        self.pending = 0
        self.flushes: list[int] = []

    def flush(self) -> None:
        self.flushes.append(self.pending)
        self.pending = 0


class BufferedWriter(RecordingWriter):
    """A writer that buffers its response in ``output``."""

    def __init__(self, pipeline: RequestPipeline, output: Output) -> None:
        super().__init__()
        self.pipeline, self.output = pipeline, output

    def write_response(
        self, parts: ResponseChunks, nbytes: int, headers: HeaderList | None = None
    ) -> None:
        super().write_response(parts, nbytes, headers)
        if not self.output.pending:
            self.pipeline.flush_later(self.output.flush)
        self.output.pending += 1


async def test_the_answers_of_a_batch_are_written_together_at_its_end(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    pipeline = make_pipeline(engine, executor=executor)
    outputs = Output(), Output()
    for i in range(5):
        writer = BufferedWriter(pipeline, outputs[i % 2])
        pipeline.submit(RecordingCall(pipeline, asked(pipeline), writer=writer), BODY)
    await until(lambda: outputs[1].flushes)
    await asyncio.sleep(0)
    assert [output.flushes for output in outputs] == [[3], [2]]


async def test_what_is_written_beside_a_batch_is_flushed_in_the_next_turn(
    pipeline: RequestPipeline,
) -> None:
    output = Output()
    pipeline.flush_later(output.flush)
    assert output.flushes == []
    await asyncio.sleep(0)
    assert output.flushes == [0]
    await asyncio.sleep(0)
    assert output.flushes == [0]


async def test_a_writer_that_fails_keeps_no_other_from_writing(
    pipeline: RequestPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    flushed: list[str] = []

    def broken() -> None:
        flushed.append("broken")
        raise RuntimeError("its transport is closed")

    def whole() -> None:
        flushed.append("whole")

    for flush in (whole, broken, whole):
        pipeline.flush_later(flush)
    pipeline.flush()
    assert flushed == ["whole", "broken", "whole"]
    assert "its transport is closed" in caplog.text
