"""Tests of the turns at the codec thread; test_pipeline_decoding has those of callers."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from server.codecs import JSON, decoding_in_thread
from server.fake_engine import FakeEngine
from server.gate import Gate
from server.live import make_pipeline
from server.recording_call import BODY, RecordingCall, SourceWriter, make_options
from server.waiting import until

from embedserve.lookup_types import LookupRequest, WouldBlockError
from embedserve.pipeline import decode_later


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
