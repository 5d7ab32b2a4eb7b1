"""Tests of encoding in a thread: large responses are encoded off the event loop, which serves other
requests meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import orjson
import pytest
from server.codecs import JSON
from server.fake_engine import FakeEngine
from server.gate import Gate
from server.live import make_pipeline
from server.recording_call import RecordingCall, ask, asked, expect_internal, fail, outcomes
from server.waiting import until

from embedserve.codec import json_codec
from embedserve.codec.codec import Codec
from embedserve.errors import OverloadedError
from embedserve.pipeline import RequestPipeline, codec_executor

EXAMPLES = json_codec.INLINE_VALUES_MAX // 9 + 1
"""Examples of nine values each, just too many to encode on the event loop."""
BODY = b'{"features": {"user": [%b[1, 2]]}}' % (b"[]," * (EXAMPLES - 1))


def held(gate: Gate) -> Codec:
    """Returns the JSON codec, whose encoding in the thread waits at ``gate``."""
    return replace(JSON, encode=gate.before(JSON.encode))


@pytest.fixture
def pipeline(engine: FakeEngine, executor: ThreadPoolExecutor) -> RequestPipeline:
    return make_pipeline(engine, executor=executor)


def ask_large(pipeline: RequestPipeline, codec: Codec) -> RecordingCall:
    call = RecordingCall(pipeline, replace(asked(pipeline), response_codec=codec))
    pipeline.submit(call, BODY)
    return call


async def test_others_are_answered_while_a_large_answer_is_encoded(
    pipeline: RequestPipeline, engine: FakeEngine, gate: Gate
) -> None:
    large = ask_large(pipeline, held(gate))
    await until(lambda: gate.threads)
    small = ask(pipeline)
    await until(lambda: small.told)
    assert large.told == []
    assert outcomes(pipeline) == {"OK": 1}
    gate.opened.set()
    await until(lambda: large.told)
    (body,) = large.told
    assert isinstance(body, bytes)
    values = np.array(orjson.loads(body)["values"], np.float32)
    expected = engine.expected({"user": [*([] for _ in range(EXAMPLES - 1)), [1, 2]]})
    assert np.array_equal(values, expected)
    assert gate.threads[0] is not threading.main_thread()
    assert outcomes(pipeline) == {"OK": 2}


async def test_a_client_that_leaves_meanwhile_is_told_nothing(
    pipeline: RequestPipeline, gate: Gate
) -> None:
    gone, other = ask_large(pipeline, held(gate)), ask_large(pipeline, held(gate))
    await until(lambda: gate.threads)
    gone.cancel()
    gate.opened.set()
    await until(lambda: other.told)
    assert gone.told == []
    assert outcomes(pipeline) == {"CANCELLED": 1, "OK": 1}


async def test_an_unforeseen_error_in_the_thread_is_answered_in_general(
    pipeline: RequestPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    call = ask_large(pipeline, replace(JSON, encode=fail))
    await until(lambda: call.told)
    expect_internal(call, caplog)
    assert outcomes(pipeline) == {"INTERNAL": 1}


async def test_an_answer_that_cannot_be_written_is_answered_in_general(
    pipeline: RequestPipeline, caplog: pytest.LogCaptureFixture, gate: Gate
) -> None:
    call = ask_large(pipeline, held(gate))
    call.writer.failure = ZeroDivisionError("secret of the server")
    gate.opened.set()
    await until(lambda: call.told)
    expect_internal(call, caplog)


async def test_no_more_than_so_many_bytes_wait_to_be_encoded(
    pipeline: RequestPipeline, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = EXAMPLES * 9 * 4
    monkeypatch.setattr(codec_executor, "WAITING_BYTES_MAX", nbytes)
    waiting = ask_large(pipeline, held(gate))
    await until(lambda: gate.threads)
    over = ask_large(pipeline, held(gate))
    await until(lambda: over.told)
    assert isinstance(over.error, OverloadedError)
    assert over.error.message.startswith(f"answer has {nbytes} bytes, and {nbytes} of other ")
    gate.opened.set()
    await until(lambda: waiting.told)
    again = ask_large(pipeline, held(gate))
    await until(lambda: again.told)
    assert outcomes(pipeline) == {"OK": 2, "RESOURCE_EXHAUSTED": 1}
