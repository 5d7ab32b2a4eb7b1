"""Tests of the spans of calls to other servers: they are below the requests of their batch."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import numpy as np
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from server.collector import collecting
from server.fake_engine import FakeEngine
from server.live import make_pipeline, serving
from server.waiting import WAIT_S_MAX

from embedserve.call_trace import CallTrace
from embedserve.errors import EmbedServeError
from embedserve.lookup_types import Batch
from embedserve.pipeline.telemetry import RequestTelemetry
from embedserve.tracing import otlp
from embedserve.tracing.otlp import OtlpTraces, spans_of
from embedserve.tracing.record import RequestRecord, StageTimings
from embedserve.tracing.trace_context import TraceContext

FIRST = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True)
SECOND = TraceContext("a" * 32, "b" * 16, True)
BODY = b'{"features": {"user": [[1], [2, 3]]}}'


def make_call_trace(trace: TraceContext) -> CallTrace:
    """Returns a call that succeeds, one that fails and one in flight."""
    calls = CallTrace(trace)
    for part in range(3):
        assert calls.begin(part, f"h:{part}", "first") is not None
    calls.calls[0].end("OK")
    calls.calls[1].end("UNAVAILABLE", "draining")
    return calls


def spans_below(trace: TraceContext, calls: CallTrace) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """Returns the span of a request of the batch of ``calls``, and the spans of the calls."""
    end_s = perf_counter()
    times = StageTimings((end_s - 0.003, end_s - 0.002), end_s)
    record = RequestRecord("a7", "rest", "OK", times, trace=trace, calls=calls)
    root, *others = spans_of(record, 10**18, Resource.create({}))
    return root, [span for span in others if span.kind is SpanKind.CLIENT]


def test_each_shard_call_is_a_child_span_of_the_request() -> None:
    calls = make_call_trace(FIRST)
    root, spans = spans_below(FIRST, calls)
    assert [span.name for span in spans] == [f"call part {part}" for part in range(3)]
    for part, (span, call) in enumerate(zip(spans, calls.calls, strict=True)):
        assert span.parent == root.context
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == FIRST.trace_id
        assert f"{span.context.span_id:016x}" == call.span_id
        assert not span.links
        assert span.attributes is not None
        assert span.attributes["embedserve.part"] == part
        assert span.attributes["embedserve.replica"] == f"h:{part}"
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
    outcomes = [(span.attributes or {})["embedserve.outcome"] for span in spans]
    assert outcomes == ["OK", "UNAVAILABLE", "IN_FLIGHT"]
    statuses = [(span.status.status_code, span.status.description) for span in spans]
    assert statuses == [
        (StatusCode.UNSET, None),
        (StatusCode.ERROR, "draining"),
        (StatusCode.UNSET, None),
    ]


def test_other_requests_of_the_batch_link_to_the_shard_spans() -> None:
    calls = make_call_trace(FIRST)
    for trace in (SECOND, TraceContext(FIRST.trace_id, SECOND.parent_id, True)):
        root, spans = spans_below(trace, calls)
        assert len(spans) == 3
        for span, call in zip(spans, calls.calls, strict=True):
            assert span.parent == root.context
            assert span.context is not None
            assert f"{span.context.trace_id:032x}" == trace.trace_id
            assert f"{span.context.span_id:016x}" != call.span_id
            (link,) = span.links
            assert f"{link.context.trace_id:032x}" == FIRST.trace_id
            assert f"{link.context.span_id:016x}" == call.span_id


class FakeShards:
    """Other servers, which respond immediately with one call."""

    batches_max = 1
    traces_calls = True

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.traced: list[bool] = []

    def begin(
        self,
        batch: Batch,
        deadline_s: float,
        finish: Callable[[np.ndarray | EmbedServeError], None],
    ) -> None:
        self.traced.append(batch.calls is not None)
        if batch.calls is not None:
            call = batch.calls.begin(0, "h:1", "first")
            assert call is not None
            call.end("OK")
        values = self._engine.lookup(batch.ids, batch.lengths, batch.weights)
        asyncio.get_running_loop().call_soon(finish, values)


async def test_sampled_request_and_its_shard_calls_share_one_trace(
    engine: FakeEngine, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "STOP_S_MAX", WAIT_S_MAX)  # for the last spans
    servers = engine.remote = FakeShards(engine)
    with collecting() as collector:
        pipeline = make_pipeline(engine, executor=executor)
        pipeline.telemetry = RequestTelemetry(traces=OtlpTraces(collector.url, 100))
        unsampled = {"traceparent": f"00-{FIRST.trace_id}-{FIRST.parent_id}-00"}
        async with serving(pipeline) as live:
            for headers in ({}, unsampled):
                response = await live.http.post("/embed", content=BODY, headers=headers)
                assert response.status_code == 200
        assert servers.traced == [True, False]
        (root,) = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
        (call,) = [span for span in collector.spans if span.kind == Span.SPAN_KIND_CLIENT]
        assert (call.trace_id, call.parent_span_id) == (root.trace_id, root.span_id)
