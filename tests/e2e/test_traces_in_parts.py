"""Tests of traces: a request to a router and its calls to shards are one trace."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import httpx
import pytest
from e2e.parts_cluster import BOTH_PARTS, PARTS, cluster, publish_next, replicas
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from running_servers import Running
from server.collector import Collector, attributes, collecting
from waits import wait_until

CALLER = "00f067aa0ba902b7"
TRACES = (1, 2)
"""Ids of the traces of the tests that share the parts."""
BODY = {"features": {"user": [BOTH_PARTS]}}
TIMEOUT = ("--shard-timeout-ms", 2500)
"""Timeout option for a call that hangs, in ms.

It is long enough for another call on a busy machine, and half of the time after which the
connection is lost."""


@dataclass
class TracedParts:
    """Shards and a router that export their spans to ``collector``."""

    shards: dict[tuple[int, int], Running]
    router: Running
    collector: Collector


@contextmanager
def traced_parts(
    folder: Path, shards: Sequence[tuple[int, int]], *options: object
) -> Iterator[TracedParts]:
    """Starts shards, each by (part, number of the replica), and a router with ``options``."""
    publish_next(folder / "store", 1)
    with collecting() as collector, cluster(folder / "store", folder) as one:
        traces = ("--otlp-endpoint", collector.url)
        for part, replica in shards:
            one.start_shard(part, replica, *traces)
        one.write_addresses()
        yield TracedParts(one.shards, one.start_router(*traces, *options), collector)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedParts]:
    """Yields parts of one replica each, and a router with TIMEOUT."""
    shards = [(part, 0) for part in range(PARTS)]
    with traced_parts(tmp_path_factory.mktemp("traced"), shards, *TIMEOUT) as one:
        yield one


def embed(router: Running, trace: int | None) -> int:
    """Sends a request for rows of all parts in a trace, and returns its status."""
    headers = {} if trace is None else {"traceparent": f"00-{trace:032x}-{CALLER}-01"}
    return httpx.post(f"{router.http}/embed", json=BODY, headers=headers, timeout=60).status_code


def spans_of(collector: Collector, trace: int, kind: int) -> list[Span]:
    own = f"{trace:032x}"
    return [one for one in list(collector.spans) if (one.trace_id.hex(), one.kind) == (own, kind)]


def router_span(collector: Collector, trace: int) -> Span:
    """Waits for the router's span of a request."""

    def found() -> list[Span]:
        servers = spans_of(collector, trace, Span.SPAN_KIND_SERVER)
        return [one for one in servers if one.parent_span_id.hex() == CALLER]

    wait_until(lambda: bool(found()))
    (root,) = found()
    return root


def test_call_spans_link_the_spans_of_router_and_shards(parts: TracedParts) -> None:
    collector = parts.collector
    wait_until(lambda: replicas(parts.router) == [1, 1])
    assert embed(parts.router, None) == 200
    assert embed(parts.router, 1) == 200
    root = router_span(collector, 1)
    wait_until(lambda: len(spans_of(collector, 1, Span.SPAN_KIND_SERVER)) == 1 + PARTS)
    calls = spans_of(collector, 1, Span.SPAN_KIND_CLIENT)
    assert {call.parent_span_id for call in calls} == {root.span_id}
    assert [attributes(call) for call in sorted(calls, key=lambda call: call.name)] == [
        {
            "part": part,
            "replica": parts.shards[part, 0].grpc,
            "reason": "first",
            "outcome": "OK",
        }
        for part in range(PARTS)
    ]
    shards = [one for one in spans_of(collector, 1, Span.SPAN_KIND_SERVER) if one != root]
    assert {one.parent_span_id for one in shards} == {call.span_id for call in calls}
    assert {one.name for one in shards} == {"embed m@1"}
    # Neither the router nor a shard has recorded the request without a traceparent.
    traces = {f"{trace:032x}" for trace in TRACES}
    assert {span.trace_id.hex() for span in list(collector.spans)} <= traces


def test_failed_call_span_has_its_outcome(parts: TracedParts) -> None:
    collector = parts.collector
    wait_until(lambda: replicas(parts.router) == [1, 1])
    hung = parts.shards[1, 0].process
    os.kill(hung.pid, signal.SIGSTOP)
    try:
        assert embed(parts.router, 2) == 504
    finally:
        os.kill(hung.pid, signal.SIGCONT)
    root = router_span(collector, 2)
    assert attributes(root)["outcome"] == "DEADLINE_EXCEEDED"
    calls = {
        attributes(call)["part"]: call for call in spans_of(collector, 2, Span.SPAN_KIND_CLIENT)
    }
    assert [attributes(calls[part])["outcome"] for part in range(PARTS)] == [
        "OK",
        "DEADLINE_EXCEEDED",
    ]
    assert [calls[part].status.code for part in range(PARTS)] == [
        Status.STATUS_CODE_UNSET,
        Status.STATUS_CODE_ERROR,
    ]


def test_hedge_of_a_slow_call_is_a_separate_span(tmp_path: Path) -> None:
    with traced_parts(tmp_path, [(0, 0), (0, 1), (1, 0)]) as parts:
        check_hedge(parts)


def check_hedge(parts: TracedParts) -> None:
    router, collector = parts.router, parts.collector
    wait_until(lambda: replicas(router) == [2, 1])
    hung = parts.shards[0, 0]

    def traced_calls(trace: int) -> list[dict[str, object]]:
        """Returns the calls to part 0, once the router's span has arrived."""
        router_span(collector, trace)
        calls = map(attributes, spans_of(collector, trace, Span.SPAN_KIND_CLIENT))
        return [one for one in calls if one["part"] == 0]

    # A replica that leaves a poll unanswered counts as busier, and the router soon stops choosing
    # it.
    for start_at in count(1, 10):
        assert start_at < 300, "all requests were sent to the other replica"
        traces = range(start_at, start_at + 10)
        os.kill(hung.process.pid, signal.SIGSTOP)
        try:
            assert {embed(router, trace) for trace in traces} == {200}
        finally:
            os.kill(hung.process.pid, signal.SIGCONT)
        found = [trace for trace in traces if traced_calls(trace)[0]["replica"] == hung.grpc]
        if found:
            break
    root = router_span(collector, found[0])
    calls = spans_of(collector, found[0], Span.SPAN_KIND_CLIENT)
    first, *others = traced_calls(found[0])
    assert {call.parent_span_id for call in calls} == {root.span_id}
    assert (first["reason"], first["outcome"]) == ("first", "CANCELLED")
    (second,) = others
    assert second["reason"] in ("hedge", "hung")
    assert second["outcome"] == "OK"
    assert second["replica"] == parts.shards[0, 1].grpc
