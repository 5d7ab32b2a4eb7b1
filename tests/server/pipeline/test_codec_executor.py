"""Tests of the codec thread: turns, bytes that wait, and what it keeps of requests.

Turns of callers are tested in test_decoding.
"""

import gc
import logging
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from server.codecs import JSON, decoding_in_thread
from server.fake_engine import FakeEngine
from server.gate import Gate
from server.live import make_pipeline
from server.pipeline.test_decoding import LARGE, LIMITS, gated_codec
from server.recording_call import (
    BODY,
    RecordingCall,
    SourceWriter,
    make_options,
    outcomes,
    submit_request,
)
from server.thread_limit import make_thread_start_fail
from server.waiting import until

from embedserve.codec.codec import Codec
from embedserve.config import Limits
from embedserve.lookup_types import LookupRequest, WouldBlockError
from embedserve.pipeline import RequestPipeline, codec_executor, decode_later


@pytest.fixture
def limits() -> Limits:
    return LIMITS


async def test_compressed_bodies_have_every_second_turn_however_many_callers_send_them(
    engine: FakeEngine, executor: ThreadPoolExecutor, gate: Gate
) -> None:
    pipeline = make_pipeline(engine, executor=executor)
    decoded: list[str] = []

    def submit(source: str, *, is_compressed: bool) -> RecordingCall:
        def block(*args: Any, **kwargs: Any) -> LookupRequest:
            raise WouldBlockError

        def decode(*args: Any) -> LookupRequest:
            decoded.append(source)
            return JSON.decode(*args)

        codec = decoding_in_thread(replace(JSON, decode=block), gate.before(decode))
        options = make_options(pipeline, codec)
        call = RecordingCall(pipeline, options, writer=SourceWriter(source))
        if is_compressed:
            decode_later(call, 1, lambda: BODY, is_compressed=True)
        else:
            pipeline.submit(call, BODY)
        return call

    calls = [submit(source, is_compressed=True) for source in ("A", "A", "B", "B", "C")]
    await until(lambda: gate.threads)
    calls += [submit(source, is_compressed=False) for source in ("D", "D", "E")]
    gate.opened.set()
    await until(lambda: all(call.responses for call in calls))
    assert "".join(decoded) == "ADAEBDCB"


async def test_request_cancelled_while_queued_is_not_decoded(
    pipeline: RequestPipeline, gate: Gate
) -> None:
    calls = [submit_request(pipeline, LARGE, gated_codec(gate))]
    await until(lambda: gate.threads)
    cancelled = submit_request(pipeline, LARGE, gated_codec(gate))
    calls.append(submit_request(pipeline, LARGE, gated_codec(gate)))
    cancelled.cancel()
    gate.opened.set()
    await until(lambda: all(call.responses for call in calls))
    assert len(gate.threads) == 2


async def test_bytes_of_a_caller_count_until_its_last_request_is_decoded(
    pipeline: RequestPipeline, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_executor, "WAITING_BYTES_MAX", 4 * len(LARGE))

    def submit_as_a(codec: Codec) -> RecordingCall:
        return submit_request(pipeline, LARGE, codec, writer=SourceWriter("A"))

    calls = [submit_as_a(codec) for codec in (JSON, gated_codec(gate))]
    await until(lambda: gate.threads)  # the first one is decoded
    calls.append(submit_as_a(JSON))
    assert f"{2 * len(LARGE)} of other large" in submit_as_a(JSON).error.message
    gate.opened.set()
    await until(lambda: all(call.responses for call in calls))


@pytest.mark.parametrize("has_thread", [True, False])
async def test_request_is_freed_once_it_is_decoded_or_has_failed(
    pipeline: RequestPipeline,
    has_thread: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)  # a traceback that is logged would keep it alive
    if not has_thread:
        make_thread_start_fail(monkeypatch, "codec")
    calls = [submit_request(pipeline, LARGE)]
    await until(lambda: calls[0].responses)
    writer = weakref.ref(calls.pop().writer)

    def is_freed() -> bool:
        gc.collect()
        return writer() is None

    await until(is_freed)  # the thread may hold its last call for a moment
    assert outcomes(pipeline) == {"OK" if has_thread else "INTERNAL": 1}
