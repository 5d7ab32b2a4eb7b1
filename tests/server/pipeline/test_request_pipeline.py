"""Tests of the request pipeline: load shedding before decoding, deadlines, counts and flushes."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from server.codecs import JSON, PROTOBUF, decoding_in_thread
from server.fake_engine import FakeEngine, model_info
from server.live import make_pipeline
from server.recording_call import (
    BODY,
    SECRET,
    RecordingCall,
    RecordingWriter,
    SourceWriter,
    expect_internal,
    fail,
    make_options,
    metrics_of,
    outcomes,
    submit_request,
)
from server.waiting import WAIT_S_MAX, until

from embedserve.access.caller_quota import CallerQuota
from embedserve.access.grants import Grant
from embedserve.codec.codec import Codec
from embedserve.config import Limits
from embedserve.errors import DeadlineExceededError, OverloadedError
from embedserve.lookup_types import LookupRequest, ResponseChunks
from embedserve.pipeline import RequestOptions, RequestPipeline
from embedserve.pipeline.telemetry import RequestTelemetry
from embedserve.tracing.request_id import ExtraHeaders
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
    running = submit_request(pipeline)
    await until(lambda: engine.lookups)
    waiting = submit_request(pipeline)
    assert isinstance(submit_request(pipeline).error, OverloadedError)
    assert outcomes(pipeline) == {"RESOURCE_EXHAUSTED": 1}
    yield pipeline
    engine.release()
    await until(lambda: running.responses and waiting.responses)


def recording_codec(decoded: list[bytes], codec: Codec) -> Codec:
    """Returns ``codec`` with a decoder that appends each body to ``decoded``."""

    def decode(body: bytes, *args: Any, **kwargs: Any) -> LookupRequest:
        decoded.append(body)
        return codec.decode(body, *args, **kwargs)

    return replace(codec, decode=decode)


def bodies(codec: Codec, *bags: list[int]) -> Sequence[bytes]:
    """Returns a request for each bag."""
    if codec is JSON:
        return [json.dumps({"features": {"user": bag}}).encode() for bag in bags]
    messages = [pb.EmbedRequest(keys=["user"], ids=bag, lengths=[len(bag)]) for bag in bags]
    return [message.SerializeToString() for message in messages]


def submit_each(pipeline: RequestPipeline, codec: Codec, *bodies: bytes) -> list[RecordingCall]:
    return [submit_request(pipeline, body, codec) for body in bodies]


async def test_request_to_an_overloaded_model_is_rejected_before_decoding(
    full: RequestPipeline,
) -> None:
    decoded: list[bytes] = []
    for model in ("", "shop"):
        body = b"not decoded, so not said to be wrong"
        call = submit_request(full, body, recording_codec(decoded, JSON), model=model)
        assert isinstance(call.error, OverloadedError)
        assert call.error.message == "the queue of 'shop' is full: it holds 1 examples and 1 ids"
    assert decoded == []
    assert outcomes(full) == {"RESOURCE_EXHAUSTED": 3}


async def test_overloaded_model_does_not_block_another_model(
    full: RequestPipeline, other: FakeEngine
) -> None:
    call = submit_request(full, model="films")
    await until(lambda: call.responses)
    assert isinstance(call.responses[0], bytes)
    assert len(other.lookups) == 1


@pytest.mark.parametrize(
    ("named_model", "is_rejected"), [("films", False), ("shop", True), ("", True)]
)
async def test_model_named_in_a_message_decides_rejection_before_decoding(
    full: RequestPipeline, named_model: str, is_rejected: bool
) -> None:
    decoded: list[bytes] = []
    message = pb.EmbedRequest(model=named_model, keys=["user"], ids=[1], lengths=[1])
    call = submit_request(full, message.SerializeToString(), recording_codec(decoded, PROTOBUF))
    await until(lambda: call.responses)
    assert bool(decoded) != is_rejected
    assert isinstance(call.responses[0], OverloadedError) == is_rejected


@pytest.mark.parametrize("codec", [JSON, PROTOBUF])
async def test_large_requests_are_rejected_before_decoding_if_their_queue_is_full(
    engine: FakeEngine, executor: ThreadPoolExecutor, codec: Codec
) -> None:
    body, large, huge = bodies(codec, [1], [1] * 200, [1] * 400_000)
    pipeline = make_pipeline(engine, executor=executor, limits=LARGE_LIMITS)
    engine.hold()
    accepted = submit_each(pipeline, codec, large)
    await until(lambda: engine.lookups)
    accepted += submit_each(pipeline, codec, large)
    (rejected,) = submit_each(pipeline, codec, large)
    assert "holds 1 examples; 1 more would exceed" in rejected.error.message
    message = "the queue of 'shop' for large requests is full: it holds 1 examples and 200 ids"
    decoded: list[bytes] = []
    watched = decoding_in_thread(recording_codec(decoded, codec), fail)
    undecoded = submit_each(pipeline, watched, large, huge)
    await until(lambda: all(call.responses for call in undecoded))  # the last one in the thread
    assert [call.error.message for call in undecoded] == [message, message]
    assert large not in decoded  # a large request is not even decoded in the thread
    (small,) = submit_each(pipeline, watched, body)
    await until(lambda: small.responses)
    assert isinstance(small.responses[0], bytes)
    assert decoded[-1] == body
    engine.release()
    await until(lambda: all(call.responses for call in accepted))
    assert outcomes(pipeline) == {"OK": 3, "RESOURCE_EXHAUSTED": 3}


async def test_requests_waiting_for_decoding_are_rejected_once_the_queue_is_full(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    large, huge = bodies(JSON, [1] * 200, [1] * 400_000)
    pipeline = make_pipeline(engine, executor=executor, limits=LARGE_LIMITS)
    engine.hold()
    gate = threading.Event()

    def decode(*args: Any) -> LookupRequest:
        gate.wait()
        return JSON.decode(*args)

    (decoded,) = submit_each(pipeline, decoding_in_thread(JSON, decode), huge)
    (queued,) = submit_each(pipeline, decoding_in_thread(JSON, fail), huge)
    accepted = submit_each(pipeline, JSON, large)
    await until(lambda: engine.lookups)
    accepted += submit_each(pipeline, JSON, large)
    (rejected,) = submit_each(pipeline, JSON, large)
    assert isinstance(rejected.error, OverloadedError)
    gate.set()
    await until(lambda: queued.responses)
    assert decoded.error.message == queued.error.message
    assert "for large requests is full" in queued.error.message
    engine.release()
    await until(lambda: all(call.responses for call in accepted))
    assert outcomes(pipeline) == {"OK": 2, "RESOURCE_EXHAUSTED": 3}


async def test_overloaded_model_rejects_requests_before_their_body_arrives(
    full: RequestPipeline,
) -> None:
    call = RecordingCall(full, make_options(full, model="shop"))
    full.reject_if_overloaded(call)
    assert isinstance(call.error, OverloadedError)
    assert not call.is_waiting
    assert outcomes(full) == {"RESOURCE_EXHAUSTED": 2}
    for model in ("", "films", "nobody"):
        call = RecordingCall(full, make_options(full, model=model))
        full.reject_if_overloaded(call)
        assert call.responses == []
        assert call.is_waiting
    assert outcomes(full) == {"RESOURCE_EXHAUSTED": 2}


async def test_requests_are_not_rejected_early_while_the_queue_has_room(
    pipeline: RequestPipeline,
) -> None:
    call = RecordingCall(pipeline, make_options(pipeline, model="shop"))
    pipeline.reject_if_overloaded(call)
    assert (call.responses, outcomes(pipeline)) == ([], {})


@pytest.mark.parametrize("sends_timing", [False, True], ids=["unobserved", "observed"])
async def test_connections_of_one_caller_have_one_share_of_the_queue(
    engine: FakeEngine, executor: ThreadPoolExecutor, sends_timing: bool
) -> None:
    limits = Limits(inline_bytes_max=0, queue_examples_max=4)
    pipeline = make_pipeline(engine, executor=executor, limits=limits)
    pipeline.telemetry = RequestTelemetry(sends_timing=sends_timing)
    quota = CallerQuota(Grant("x"))
    calls: list[RecordingCall] = []
    engine.hold()
    for connection in "abcd":
        calls.append(RecordingCall(pipeline, make_options(pipeline), SourceWriter(connection)))
        calls[-1].quota = quota
        quota.active += 1
        pipeline.submit(calls[-1], BODY)
        await until(lambda: engine.lookups)
    message = "holds 2 examples of this caller; 1 more would exceed its share of 2"
    assert message in calls[-1].error.message
    engine.release()
    await until(lambda: all(call.responses for call in calls))
    for call in calls:
        call.cancel()  # its client leaves later
    assert quota.active == 0
    assert outcomes(pipeline) == {"OK": 3, "RESOURCE_EXHAUSTED": 1}
    assert quota.take_outcomes() == {"OK": 3, "RESOURCE_EXHAUSTED": 1}


async def test_subscribers_are_notified_when_the_queue_reopens(
    pipeline: RequestPipeline, engine: FakeEngine
) -> None:
    notified: list[bool] = []
    pipeline.on_queue_reopened(lambda: notified.append(not pipeline.models.has_full_queue))
    engine.hold()
    first = submit_request(pipeline)
    await until(lambda: engine.lookups)
    second = submit_request(pipeline)
    submit_request(pipeline)
    assert (notified, pipeline.models.has_full_queue) == ([], True)
    engine.release()
    await until(lambda: first.responses and second.responses)
    assert notified == [True]


async def test_deadline_counts_from_the_start_of_the_request(
    pipeline: RequestPipeline, engine: FakeEngine
) -> None:
    decoded: list[bytes] = []
    codec = recording_codec(decoded, JSON)
    late = submit_request(pipeline, BODY, codec, timeout_s=500.0, age_s=510)
    assert isinstance(late.error, DeadlineExceededError)
    message = "the deadline had passed when the request was read, "
    assert late.error.message.startswith(message)
    # The time counts from the start of the request, not from the deadline. The range allows for a
    # test that takes up to a minute.
    assert 510_000 <= float(late.error.message.removeprefix(message).split()[0]) < 570_000
    assert decoded == []
    assert outcomes(pipeline) == {"DEADLINE_EXCEEDED": 1}
    in_time = submit_request(pipeline, BODY, codec, timeout_s=500.0, age_s=100)
    await until(lambda: in_time.responses)
    assert isinstance(in_time.responses[0], bytes)
    assert len(engine.lookups) == 1


async def test_rejected_slow_requests_are_among_the_slowest(
    pipeline: RequestPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pipeline.telemetry = RequestTelemetry(slow_ms=100_000)
    submit_request(pipeline, b"{")
    assert pipeline.telemetry.slow.fields() == []
    submit_request(pipeline, timeout_s=5.0, age_s=110)
    (slow,) = pipeline.telemetry.slow.fields()
    assert slow["outcome"] == "DEADLINE_EXCEEDED"
    assert 110_000 <= slow["total_ms"] < 170_000
    # Each request has only the line that every rejected request has.
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "rejected with INVALID_ARGUMENT",
        "rejected with DEADLINE_EXCEEDED",
    ]


async def test_delayed_rejection_ends_with_its_client(pipeline: RequestPipeline) -> None:
    calls = [RecordingCall(pipeline, make_options(pipeline)) for _ in range(2)]
    for call in calls:
        call.reject_after(OverloadedError("too many requests"), 0.01)
    calls[0].cancel()
    await until(lambda: calls[1].responses)
    assert calls[0].responses == []
    assert outcomes(pipeline) == {"CANCELLED": 1, "RESOURCE_EXHAUSTED": 1}


async def test_unexpected_error_while_decoding_returns_a_general_message(
    pipeline: RequestPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    call = submit_request(pipeline, BODY, replace(JSON, decode=fail))
    expect_internal(call, caplog)
    assert outcomes(pipeline) == {"INTERNAL": 1}


async def test_unexpected_error_while_reading_the_model_returns_a_general_message(
    full: RequestPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    call = submit_request(full, b"", replace(PROTOBUF, peek_model=fail))
    expect_internal(call, caplog)


async def test_encoding_error_fails_only_its_own_request(
    engine: FakeEngine, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = make_pipeline(engine, executor=executor)
    options = RequestOptions(
        "", JSON, replace(PROTOBUF, try_encode_inline=fail), None, metrics_of(pipeline)
    )
    others = (RecordingCall(pipeline, one) for one in (options, make_options(pipeline)))
    batch_calls = [submit_request(pipeline), *others]
    for call in batch_calls[1:]:
        pipeline.submit(call, BODY)
    await until(lambda: all(call.responses for call in batch_calls))
    assert len(engine.lookups) == 1
    expect_internal(batch_calls[1], caplog)
    assert isinstance(batch_calls[0].responses[0], bytes)
    assert batch_calls[0].responses == batch_calls[2].responses
    assert outcomes(pipeline) == {"OK": 2, "INTERNAL": 1}


async def test_write_error_fails_only_its_own_request(
    engine: FakeEngine, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = make_pipeline(engine, executor=executor)
    failing = RecordingWriter()
    failing.failure = ZeroDivisionError(SECRET)
    first, second = submit_request(pipeline, writer=failing), submit_request(pipeline)
    await until(lambda: first.responses and second.responses)
    expect_internal(first, caplog)
    assert isinstance(second.responses[0], bytes)
    assert outcomes(pipeline) == {"OK": 1, "INTERNAL": 1}


@pytest.mark.parametrize("body", [BODY, BAD])
async def test_request_whose_error_cannot_be_written_fails_alone(
    engine: FakeEngine, executor: ThreadPoolExecutor, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Covers a response that cannot be written, and a rejection of the batcher."""
    pipeline = make_pipeline(engine, executor=executor)
    failing = RecordingWriter()
    failing.failure = failing.error_failure = ZeroDivisionError(SECRET)
    first, second = submit_request(pipeline, body, writer=failing), submit_request(pipeline)
    await until(lambda: second.responses)
    assert isinstance(second.responses[0], bytes)
    assert first.writer.is_aborted
    assert not first.is_waiting
    assert "an error could not be written" in caplog.text
    assert sum(outcomes(pipeline).values()) == 2


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
        self, parts: ResponseChunks, nbytes: int, headers: ExtraHeaders | None = None
    ) -> None:
        super().write_response(parts, nbytes, headers)
        if not self.output.pending:
            self.pipeline.flush_later(self.output.flush)
        self.output.pending += 1


async def test_responses_of_a_batch_are_flushed_together_at_its_end(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    pipeline = make_pipeline(engine, executor=executor)
    outputs = Output(), Output()
    writers = [BufferedWriter(pipeline, outputs[i % 2]) for i in range(5)]
    for writer in writers:
        submit_request(pipeline, writer=writer)
    async with asyncio.timeout(WAIT_S_MAX):
        while not writers[-1].responses:  # noqa: ASYNC110  only until the iteration ends
            await asyncio.sleep(0)
    assert [output.flushes for output in outputs] == [[3], [2]]
    await asyncio.sleep(0)
    assert [output.flushes for output in outputs] == [[3], [2]]


async def test_writes_outside_a_batch_are_flushed_in_the_next_loop_iteration(
    pipeline: RequestPipeline,
) -> None:
    output = Output()
    pipeline.flush_later(output.flush)
    assert output.flushes == []
    await asyncio.sleep(0)
    assert output.flushes == [0]
    await asyncio.sleep(0)
    assert output.flushes == [0]


async def test_failing_flush_does_not_stop_other_flushes(
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
