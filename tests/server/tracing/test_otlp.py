"""Tests of OTLP export: sampled spans reach a collector. One that hangs or is missing delays no
request."""

import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from server.collector import Collector, attributes, collecting
from server.fake_engine import FakeEngine
from server.live import Live, make_pipeline, serving
from server.waiting import WAIT_S_MAX, until
from waits import wait_until

from embedserve import __version__
from embedserve.metrics import rate_limited_logger
from embedserve.pipeline.telemetry import RequestTelemetry
from embedserve.tracing import otlp
from embedserve.tracing.bounded_session import BoundedSession
from embedserve.tracing.otlp import QUEUE_MAX, SENT_AT_ONCE, OtlpTraces
from embedserve.tracing.record import STAGES, RequestRecord, StageTimings
from embedserve.tracing.trace_context import TraceContext
from embedserve_proto import embedding_pb2 as pb

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = (f"00-{TRACE}-{PARENT}-{flags}" for flags in ("01", "00"))
BODY = b'{"features": {"user": [[1], [2, 3]]}}'
REQUEST = pb.EmbedRequest(keys=["user"], ids=[1, 2, 3], lengths=[1, 2])


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@asynccontextmanager
async def serving_with_traces(
    engine: FakeEngine, executor: ThreadPoolExecutor, url: str, share_percent: float = 0.0
) -> AsyncIterator[Live]:
    pipeline = make_pipeline(engine, executor=executor)
    pipeline.telemetry = RequestTelemetry(traces=OtlpTraces(url, share_percent))
    async with serving(pipeline) as live:
        yield live


@pytest.fixture
def long_stop_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the time that the stop waits for the last spans, for a busy machine."""
    monkeypatch.setattr(otlp, "STOP_S_MAX", WAIT_S_MAX)


ERROR_BY_FAULT = {
    "hangs": "timeout",
    "fails": "400",
    "redirects": "308, redirected to ''",
    "is not there": "Connection refused",
    "does not end": "the response exceeds 65536 bytes",
}


def record(number: int = 0) -> RequestRecord:
    end_s = time.perf_counter()
    times = StageTimings((end_s - 0.003, end_s - 0.002), end_s)
    trace = TraceContext(TRACE, PARENT, True)
    return RequestRecord(f"{number}", "rest", "OK", times, trace=trace)


@pytest.mark.parametrize("protocol", ["rest", "grpc"])
async def test_sampled_request_has_a_span_for_each_stage(
    engine: FakeEngine, executor: ThreadPoolExecutor, collector: Collector, protocol: str
) -> None:
    headers = {"traceparent": SAMPLED, "x-request-id": "a7"}
    before_ns = time.time_ns()
    async with serving_with_traces(engine, executor, collector.url) as live:
        if protocol == "rest":
            response = await live.http.post("/embed", content=BODY, headers=headers)
            assert response.status_code == 200
        else:
            await live.stub.Embed(REQUEST, metadata=tuple(headers.items()))
        await until(lambda: collector.spans)
    root, *stages = collector.spans
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert (root.name, root.kind) == ("embed shop", Span.SPAN_KIND_SERVER)
    assert attributes(root) == {
        "request_id": "a7",
        "address": "127.0.0.1",
        "protocol": protocol,
        "model": "shop",
        "version": 7,
        "examples": 2,
        "ids": 3,
        "outcome": "OK",
    }
    assert [span.name for span in stages] == list(STAGES)
    assert {span.trace_id for span in stages} == {root.trace_id}
    assert {span.parent_span_id for span in stages} == {root.span_id}
    assert len({span.span_id for span in (root, *stages)}) == 6
    times = [span.start_time_unix_nano for span in stages]
    ends = [*times[1:], root.end_time_unix_nano]
    assert times[0] == root.start_time_unix_nano
    assert [span.end_time_unix_nano for span in stages] == ends == sorted(ends)
    assert before_ns - 1e6 < times[0] <= ends[-1] < time.time_ns() + 1e6


@pytest.mark.usefixtures("long_stop_timeout")
async def test_unsampled_requests_are_not_exported(
    engine: FakeEngine, executor: ThreadPoolExecutor, collector: Collector
) -> None:
    async with serving_with_traces(engine, executor, collector.url) as live:
        for headers in ({}, {"traceparent": UNSAMPLED}, {"traceparent": SAMPLED}):
            await live.http.post("/embed", content=BODY, headers=headers)
    assert len(collector.spans) == 6


@pytest.mark.usefixtures("long_stop_timeout")
async def test_rejected_and_failed_requests_are_traced(
    engine: FakeEngine, executor: ThreadPoolExecutor, collector: Collector
) -> None:
    async with serving_with_traces(engine, executor, collector.url, share_percent=100) as live:
        await live.http.post("/models/nobody/embed", content=BODY)
        engine.failure = ZeroDivisionError("why")
        await live.http.post("/embed", content=BODY)
        call = live.stub.Embed(REQUEST, timeout=WAIT_S_MAX)
        assert await call.code() == grpc.StatusCode.INTERNAL
    roots = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    seen = [(root.name, attributes(root)["outcome"], root.status.code) for root in roots]
    assert seen == [
        ("embed", "NOT_FOUND", Status.STATUS_CODE_UNSET),
        ("embed shop", "INTERNAL", Status.STATUS_CODE_ERROR),
        ("embed shop", "INTERNAL", Status.STATUS_CODE_ERROR),
    ]
    assert not any(root.parent_span_id for root in roots)
    assert len({root.trace_id for root in roots}) == 3


@pytest.mark.parametrize(
    "value", ["00-zz", "x" * 5000, "ff" + SAMPLED[2:], SAMPLED + "-more", "00\tx", ""]
)
async def test_malformed_traceparent_is_ignored_and_logged_once(
    engine: FakeEngine,
    executor: ThreadPoolExecutor,
    collector: Collector,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    value: str,
) -> None:
    monkeypatch.setattr(rate_limited_logger, "PERIOD_S", 3600.0)  # more than a test may take
    async with serving_with_traces(engine, executor, collector.url) as live:
        for _ in range(20):
            headers = {"traceparent": value}
            response = await live.http.post("/embed", content=BODY, headers=headers)
            assert response.status_code == 200
    assert collector.posts == 0
    logged_lines = [line for line in caplog.messages if "traceparent is not used" in line]
    assert len(logged_lines) == 1


@pytest.mark.parametrize("fault", ERROR_BY_FAULT)
async def test_unavailable_collector_is_logged_once_and_delays_no_request(
    engine: FakeEngine,
    executor: ThreadPoolExecutor,
    collector: Collector,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    # A collector that hangs is detected by the timeout, the others by their responses. For a
    # missing collector the library reports the error once it has time to try again.
    times = {"hangs": 0.3, "is not there": 3.0}
    monkeypatch.setattr(otlp, "SEND_S_MAX", times.get(fault, WAIT_S_MAX))
    caplog.set_level(logging.INFO)
    url = collector.url
    if fault == "hangs":
        collector.may_answer.clear()
    elif fault == "fails":
        collector.status = 400
    elif fault == "redirects":
        collector.status = 308
    elif fault == "does not end":
        collector.is_endless = True
    else:
        url = "http://127.0.0.1:1"
    headers = {"traceparent": SAMPLED}
    async with serving_with_traces(engine, executor, url) as live:
        traces = live.pipeline.telemetry.traces
        assert traces is not None

        def logged_lines(text: str) -> list[str]:
            return [line for line in caplog.messages if text in line]

        for _ in range(3 * SENT_AT_ONCE):
            response = await live.http.post("/embed", content=BODY, headers=headers)
            assert json.loads(response.content)["version"] == 7
        await until(lambda: logged_lines("traces do not reach"))
        if fault != "is not there":
            collector.status, collector.is_endless = 200, False
            # The new timeout keeps a collector on a busy machine from counting as hung again.
            hasty, session = traces._exporter, BoundedSession()
            traces._exporter = type(hasty)(traces._endpoint, timeout=WAIT_S_MAX, session=session)
            collector.may_answer.set()
            await live.http.post("/embed", content=BODY, headers=headers)
            await until(lambda: logged_lines("again"))
            assert collector.spans
            hasty.shutdown()  # type: ignore[no-untyped-call]  # from the SDK
    (line,) = logged_lines("traces do not reach")
    assert ERROR_BY_FAULT[fault] in line
    assert not any(one.name.startswith("opentelemetry") for one in caplog.records)


def test_collector_that_fails_now_and_then_is_logged_once_in_a_period(
    collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "PERIOD_S", 3600.0)  # more than a test may take
    monkeypatch.setitem(BaseHTTPRequestHandler.responses, 400, ("x" * 60_000, ""))
    caplog.set_level(logging.INFO, otlp.__name__)
    traces = OtlpTraces(collector.url, 0)

    def send(status: int) -> None:
        collector.status = status
        traces.add(record())
        traces._send()

    for status in (400, 200) * 5:
        send(status)
    failure, recovery = caplog.messages
    assert "code: 400, reason: xxx" in failure
    assert len(failure) < 400
    assert "again" in recovery
    send(400)
    assert len(caplog.messages) == 2
    monkeypatch.setattr(otlp, "PERIOD_S", 0.0)
    send(400)
    assert "traces do not reach" in caplog.messages[-1]
    assert len(caplog.messages) == 3


def test_password_of_the_collector_is_sent_but_not_logged(
    collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "PERIOD_S", 0.0)
    caplog.set_level(logging.INFO)
    traces = OtlpTraces(collector.url.replace("//", "//name:secret@"), 0)
    for status in (400, 200):
        collector.status = status
        traces.add(record())
        traces._send()
    assert [f"{collector.url}/v1/traces" in line for line in caplog.messages] == [True, True]
    assert "secret" not in caplog.text
    assert collector.authorization == "Basic bmFtZTpzZWNyZXQ="


def test_exporter_filters_only_log_records_of_its_own_thread() -> None:
    """Checks that an exporter that is still stopping does not take the reason of the next one's
    outage."""
    reason = otlp._Reason()
    record = logging.LogRecord("exporter", logging.ERROR, "", 0, "no access", None, None)
    reason.thread = 1
    assert reason.filter(record)
    assert record.thread is not None
    reason.thread = record.thread
    assert not reason.filter(record)
    assert reason.line == "'no access'"


def test_trace_queue_is_bounded_and_drops_are_logged(
    collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limited_logger, "PERIOD_S", 3600.0)  # more than a test may take
    monkeypatch.setattr(otlp, "SEND_S_MAX", WAIT_S_MAX)
    monkeypatch.setattr(otlp, "STOP_S_MAX", 0.2)
    collector.may_answer.clear()
    traces = OtlpTraces(collector.url, 0)
    traces.start()
    for number in range(2 * QUEUE_MAX):
        traces.add(record(number))
    assert len([line for line in caplog.messages if "traces are left out" in line]) == 1
    traces.stop()
    assert traces._thread.is_alive()  # the stop did not wait for it: it still sends
    assert not collector.spans
    collector.may_answer.set()
    # The thread ends after the current send. The stop does not wait for the remaining spans.
    wait_until(lambda: "traces" not in [one.name for one in threading.enumerate()])


@pytest.mark.usefixtures("long_stop_timeout")
def test_queued_traces_are_exported_before_the_stop(collector: Collector) -> None:
    traces = OtlpTraces(collector.url, 0)
    traces.start()
    for number in range(3 * SENT_AT_ONCE):
        traces.add(record(number))
    traces.stop()
    roots = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert [attributes(root)["request_id"] for root in roots] == [
        str(number) for number in range(3 * SENT_AT_ONCE)
    ]


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "embedserve"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=ranker"}, "ranker"),
        (
            {"OTEL_RESOURCE_ATTRIBUTES": "service.name=ranker", "OTEL_SERVICE_NAME": "vectors"},
            "vectors",
        ),
    ],
)
def test_service_has_the_name_of_the_variables(
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    name: str,
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    traces = OtlpTraces(collector.url, 0)
    traces.add(record())
    traces._send()
    assert collector.resource["service.name"] == name
    assert collector.resource["service.version"] == __version__


def test_sampling_share_applies_to_requests_without_traceparent() -> None:
    traces = OtlpTraces("http://localhost:1", 25)
    places = [traces.sample(None) for _ in range(4000)]
    assert 700 < len([one for one in places if one is not None]) < 1300
    assert traces.sample(UNSAMPLED.encode()) is None
    assert traces.sample(SAMPLED.encode()) == TraceContext(TRACE, PARENT, True)
