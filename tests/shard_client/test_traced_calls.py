"""Tests of traced lookups: each call is recorded with its reason, replica and outcome."""

import re

import pytest
from shard_client.fake_shards import PART, Bench

from embedserve.call_trace import CALLS_MAX, CallTrace, TracedCall
from embedserve.shard_client.part_client import PartOptions
from embedserve.shard_client.reply import INTERNAL, UNAVAILABLE, Reply, status_name
from embedserve.tracing.trace_context import TraceContext, read_traceparent

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def calls() -> CallTrace:
    return CallTrace(TraceContext(TRACE, "00f067aa0ba902b7", True))


def reasons_and_outcomes(calls: CallTrace) -> list[tuple[str, str, str]]:
    return [(call.reason, call.outcome, call.message) for call in calls.calls]


def test_traced_call_has_a_span_that_the_replica_continues(calls: CallTrace) -> None:
    bench = Bench("a")
    bench.look_up(calls=calls)
    (sent,) = bench.calls
    (call,) = calls.calls
    assert (call.part, call.replica, call.end_s) == (PART, "a:1", 0)
    assert re.fullmatch("[0-9a-f]{16}", call.span_id)
    assert read_traceparent(sent.traceparent) == TraceContext(TRACE, call.span_id, True)
    sent.answer()
    assert reasons_and_outcomes(calls) == [("first", "OK", "")]
    assert call.end_s >= call.start_s


def test_untraced_calls_have_no_traceparent() -> None:
    bench = Bench("a")
    bench.look_up()
    assert [call.traceparent for call in bench.calls] == [b""]


def test_hedge_is_traced_as_its_own_call_and_the_loser_as_cancelled(calls: CallTrace) -> None:
    bench = Bench("ab")
    bench.add_latencies(0.002)
    bench.look_up(calls=calls)
    (first,) = bench.calls
    bench.time.advance(0.006)
    (second,) = [call for call in bench.calls if call is not first]
    assert first.traceparent != second.traceparent
    second.answer()
    assert reasons_and_outcomes(calls) == [("first", "CANCELLED", ""), ("hedge", "OK", "")]
    assert {call.replica for call in calls.calls} == {"a:1", "b:1"}


@pytest.mark.parametrize(("is_silent", "reason"), [(True, "hung"), (False, "retry")])
def test_call_that_replaces_a_hung_or_slow_call_is_traced_with_its_reason(
    calls: CallTrace, is_silent: bool, reason: str
) -> None:
    bench = Bench("ab", PartOptions(hedge_share=0))
    bench.add_latencies(0.001)
    bench.look_up(calls=calls)
    (first,) = bench.calls
    bench.time.advance(0.04)
    if not is_silent:
        first.connection.last_received_s = bench.time.now_s
    bench.time.advance(0.02)
    (second,) = [call for call in bench.calls if call is not first]
    second.answer()
    assert reasons_and_outcomes(calls) == [("first", "CANCELLED", ""), (reason, "OK", "")]


def test_failed_call_and_its_retry_are_traced_with_their_errors(calls: CallTrace) -> None:
    bench = Bench("ab")
    bench.look_up(calls=calls)
    bench.calls[0].answer(Reply(UNAVAILABLE, "draining"))
    bench.calls[0].answer(Reply(INTERNAL, "bug"))
    assert reasons_and_outcomes(calls) == [
        ("first", "UNAVAILABLE", "draining"),
        ("retry", "INTERNAL", "bug"),
    ]


def test_calls_over_timeout_or_deadline_are_traced_as_deadline_exceeded(calls: CallTrace) -> None:
    bench = Bench("ab", PartOptions(call_timeout_s=0.02, hedge_share=0))
    bench.look_up(0.03, calls=calls)
    bench.time.advance(0.05)
    assert [call.outcome for call in calls.calls] == ["DEADLINE_EXCEEDED"] * 2
    assert calls.calls[1].reason == "retry"


def test_traced_calls_of_a_batch_are_bounded(calls: CallTrace) -> None:
    bench = Bench("a")
    for _ in range(CALLS_MAX + 2):
        bench.look_up(calls=calls)
    assert len(calls.calls) == CALLS_MAX
    assert [call.traceparent for call in bench.calls[CALLS_MAX:]] == [b"", b""]
    for call in list(bench.calls):
        call.answer()
    assert {call.outcome for call in calls.calls} == {"OK"}


def test_traced_call_keeps_its_first_outcome() -> None:
    call = TracedCall(0, "a:1", "first", "1" * 16, 1.0)
    call.end("DEADLINE_EXCEEDED")
    end_s = call.end_s
    call.end("CANCELLED")
    assert (call.outcome, call.end_s) == ("DEADLINE_EXCEEDED", end_s)


def test_status_codes_have_names() -> None:
    assert [status_name(code) for code in (0, 2, 14, 15)] == [
        "OK",
        "UNKNOWN",
        "UNAVAILABLE",
        "status 15",
    ]
