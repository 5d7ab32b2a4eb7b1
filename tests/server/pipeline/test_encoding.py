"""Tests of encoding in a thread: large responses are encoded off the event loop, which serves other
requests meanwhile."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import orjson
import pytest
from server.codecs import JSON
from server.fake_engine import FakeEngine
from server.gate import Gate
from server.live import make_pipeline
from server.recording_call import (
    RecordingCall,
    expect_internal,
    fail,
    make_options,
    outcomes,
    submit_request,
)
from server.waiting import until

from embedserve.codec import json_codec
from embedserve.codec.codec import Codec
from embedserve.errors import OverloadedError
from embedserve.lookup_types import LookupResult
from embedserve.pipeline import RequestPipeline, codec_executor
from embedserve.pipeline.codec_executor import encode_later

EXAMPLES = json_codec.INLINE_VALUES_MAX // 9 + 1
"""Examples of nine values each, just too many to encode on the event loop."""
BODY = b'{"features": {"user": [%b[1, 2]]}}' % (b"[]," * (EXAMPLES - 1))


def gated_codec(gate: Gate) -> Codec:
    """Returns the JSON codec, whose encoding in the thread waits at ``gate``."""
    return replace(JSON, encode=gate.before(JSON.encode))


@pytest.fixture
def pipeline(engine: FakeEngine, executor: ThreadPoolExecutor) -> RequestPipeline:
    return make_pipeline(engine, executor=executor)


def submit_large(pipeline: RequestPipeline, codec: Codec) -> RecordingCall:
    call = RecordingCall(pipeline, replace(make_options(pipeline), response_codec=codec))
    pipeline.submit(call, BODY)
    return call


async def test_other_requests_are_served_while_a_large_response_is_encoded(
    pipeline: RequestPipeline, engine: FakeEngine, gate: Gate
) -> None:
    large = submit_large(pipeline, gated_codec(gate))
    await until(lambda: gate.threads)
    small = submit_request(pipeline)
    await until(lambda: small.responses)
    assert large.responses == []
    assert outcomes(pipeline) == {"OK": 1}
    gate.opened.set()
    await until(lambda: large.responses)
    (body,) = large.responses
    assert isinstance(body, bytes)
    values = np.array(orjson.loads(body)["values"], np.float32)
    expected = engine.expected({"user": [*([] for _ in range(EXAMPLES - 1)), [1, 2]]})
    assert np.array_equal(values, expected)
    assert gate.threads[0] is not threading.main_thread()
    assert outcomes(pipeline) == {"OK": 2}


async def test_response_that_waits_to_be_encoded_does_not_keep_its_batch_alive(
    pipeline: RequestPipeline, engine: FakeEngine, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[weakref.ref[np.ndarray]] = []
    look_up = engine.lookup

    def look_up_weakly(*args: Any) -> np.ndarray:
        values = look_up(*args)
        found.append(weakref.ref(values))
        return values

    monkeypatch.setattr(engine, "lookup", look_up_weakly)
    calls = [submit_large(pipeline, gated_codec(gate)) for _ in range(2)]
    await until(lambda: gate.threads)
    (values,) = found  # both are in one batch
    assert values() is None
    gate.opened.set()
    await until(lambda: all(call.responses for call in calls))


@pytest.mark.parametrize(("size", "sleeps"), [(100, 0), (32 << 10, 1), (64 << 10, 2)])
async def test_encoder_yields_the_interpreter_lock_by_the_bytes_of_its_chunks(
    pipeline: RequestPipeline, monkeypatch: pytest.MonkeyPatch, size: int, sleeps: int
) -> None:
    """Three chunks of ``size`` bytes."""
    slept: list[float] = []
    monkeypatch.setattr(codec_executor, "time", SimpleNamespace(sleep=slept.append))
    call = submit_large(pipeline, replace(JSON, encode=lambda _: [bytes(size)] * 3))
    await until(lambda: call.responses)
    assert call.responses == [bytes(3 * size)]
    assert len(slept) == sleeps


async def test_request_cancelled_during_encoding_gets_no_response(
    pipeline: RequestPipeline, gate: Gate
) -> None:
    encoded = iter([b"[", b"1", b"]"])
    codec = replace(JSON, encode=gate.before(lambda _: encoded))
    cancelled, other = submit_large(pipeline, codec), submit_large(pipeline, gated_codec(gate))
    await until(lambda: gate.threads)
    cancelled.cancel()
    gate.opened.set()
    await until(lambda: other.responses)
    assert cancelled.responses == []
    assert [*encoded] == [b"1", b"]"]  # left out, as nobody waits for them
    assert outcomes(pipeline) == {"CANCELLED": 1, "OK": 1}


async def test_unexpected_error_while_encoding_returns_a_general_message(
    pipeline: RequestPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    call = submit_large(pipeline, replace(JSON, encode=fail))
    await until(lambda: call.responses)
    expect_internal(call, caplog)
    assert outcomes(pipeline) == {"INTERNAL": 1}


async def test_unexpected_error_while_writing_returns_a_general_message(
    pipeline: RequestPipeline, caplog: pytest.LogCaptureFixture, gate: Gate
) -> None:
    call = submit_large(pipeline, gated_codec(gate))
    call.writer.failure = ZeroDivisionError("secret of the server")
    gate.opened.set()
    await until(lambda: call.responses)
    expect_internal(call, caplog)


async def test_responses_waiting_to_be_encoded_are_limited_by_bytes(
    pipeline: RequestPipeline, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = EXAMPLES * 9 * 4
    monkeypatch.setattr(codec_executor, "WAITING_BYTES_MAX", nbytes)
    waiting = submit_large(pipeline, gated_codec(gate))
    await until(lambda: gate.threads)
    over = submit_large(pipeline, gated_codec(gate))
    await until(lambda: over.responses)
    assert isinstance(over.error, OverloadedError)
    assert over.error.message.startswith(f"answer has {nbytes} bytes, and {nbytes} of other ")
    gate.opened.set()
    await until(lambda: waiting.responses)
    again = submit_large(pipeline, gated_codec(gate))
    await until(lambda: again.responses)
    assert outcomes(pipeline) == {"OK": 2, "RESOURCE_EXHAUSTED": 1}


def test_all_chunks_of_a_waiting_response_count_against_the_limit() -> None:
    context = Mock()
    values = np.zeros((1, 9), np.float32)
    encode_later(context, LookupResult(Mock(), values, extra_chunks=[values, values]))
    submitted = context.pipeline.codec_executor.submit.call_args.args
    assert submitted[:3] == (context, "answer", 3 * values.nbytes)
