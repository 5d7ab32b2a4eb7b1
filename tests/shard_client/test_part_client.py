"""Tests of the choice of replicas, retries and hedges, with fake shards and a fake clock."""

from __future__ import annotations

import logging
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_client.fake_shards import KEY, PART, PARTS, PRINT, Bench, model

from embedserve.metrics.part_stats import SHARD_OUTCOMES
from embedserve.model_names import VersionKey
from embedserve.shard_client.part_call import outcome_of
from embedserve.shard_client.part_client import PartOptions
from embedserve.shard_client.reply import (
    DEADLINE_EXCEEDED,
    INTERNAL,
    PERMISSION_DENIED,
    RESOURCE_EXHAUSTED,
    STATUS_MAX,
    UNAUTHENTICATED,
    UNAVAILABLE,
    Reply,
    lost,
)
from embedserve.shard_client.share_budget import BURST

OVERLOADED = Reply(RESOURCE_EXHAUSTED, "full", retry_after_s=1)


# Joining


def test_a_replica_joins_once_it_lists_the_version(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench()
    bench.part.set_addresses([("a", 1)])
    assert bench.part.stats.replicas == {KEY: 0}
    connection = bench.connections["a"]
    connection.ready()
    assert bench.part.reasons(KEY) == {("a", 1): "has not listed its models yet"}
    connection.list(model(version=6))
    assert bench.part.reasons(KEY) == {("a", 1): "does not serve dlrm@7"}
    bench.time.advance(1)
    connection.list(model(), model(version=6))
    assert bench.part.stats.replicas == {KEY: 1}
    assert bench.part.reasons(KEY) == {}
    bench.part.expect(VersionKey("dlrm", 6), PRINT)
    assert bench.part.stats.replicas == {KEY: 1, VersionKey("dlrm", 6): 1}
    bench.part.forget(KEY)
    assert bench.part.stats.replicas == {VersionKey("dlrm", 6): 1}
    connection.lose("reset")
    assert [record.message for record in caplog.records] == [
        "part 1 of 4: a:1 joined for dlrm@7",
        "part 1 of 4: a:1 joined for dlrm@6",
        "part 1 of 4: a:1 left dlrm@6: reset",
    ]


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        (model(fingerprint="x"), "serves dlrm@7 with fingerprint x, expected f7"),
        (model(fingerprint=""), "serves dlrm@7 with fingerprint none, expected f7"),
        (model(part=2), f"serves part 2 of {PARTS}, expected {PART} of {PARTS}"),
        (model(parts=2), f"serves part {PART} of 2, expected {PART} of {PARTS}"),
        (model(part=0, parts=0), f"serves part 0 of 0, expected {PART} of {PARTS}"),
    ],
)
def test_a_replica_of_something_else_does_not_join(listed: object, reason: str) -> None:
    bench = Bench()
    bench.part.set_addresses([("a", 1)])
    bench.connections["a"].ready()
    bench.connections["a"].list(listed)  # type: ignore[arg-type]
    assert bench.part.reasons(KEY) == {("a", 1): reason}
    bench.look_up()
    bench.time.advance(0.01)
    assert bench.replies[0] == lost(f"part 1 of 4 has no replica of dlrm@7: a:1 {reason}")


def test_a_replica_leaves_that_serves_the_version_no_more() -> None:
    bench = Bench()
    bench.join("a")
    for reply in (OVERLOADED, Reply(DEADLINE_EXCEEDED, "late")):
        bench.time.advance(1)
        bench.connections["a"].lists[0].answer(reply)
        assert bench.part.stats.replicas == {KEY: 1}
    bench.time.advance(1)
    bench.connections["a"].list(model(version=8))
    assert bench.part.stats.replicas == {KEY: 0}
    bench.time.advance(1)
    bench.connections["a"].list(model())
    assert bench.part.stats.replicas == {KEY: 1}
    bench.time.advance(1)
    bench.connections["a"].lists[0].answer(Reply(UNAVAILABLE, "draining"))
    assert bench.part.reasons(KEY) == {("a", 1): "ListModels failed with status 14: draining"}


def test_a_replica_leaves_that_lists_no_models() -> None:
    bench = Bench()
    bench.join("a", "b")
    for _ in range(7):
        bench.time.advance(1)
        if bench.connections["b"].lists:
            bench.connections["b"].list(model())
    assert bench.part.reasons(KEY) == {("a", 1): "does not answer ListModels"}
    bench.time.advance(1)
    bench.connections["a"].lists[0].answer(Reply(0, "", b"\xff"))
    assert "malformed response" in bench.part.reasons(KEY)["a", 1]
    bench.time.advance(1)
    bench.connections["a"].list(model())
    assert bench.part.stats.replicas == {KEY: 2}


def test_lost_connections_are_made_again_with_backoff() -> None:
    bench = Bench()
    bench.join("a")
    first = bench.connections["a"]
    first.lose("reset")
    assert bench.part.reasons(KEY) == {("a", 1): "reset"}
    delays = []
    for _ in range(9):
        last, start_s = bench.connections["a"], bench.time.now_s
        while bench.connections["a"] is last:
            bench.time.advance(0.01)
        delays.append(bench.time.now_s - start_s)
        bench.connections["a"].lose("refused")
    assert 0.05 <= delays[0] <= 0.12
    assert 2.5 <= delays[-1] <= 5.02
    bench.time.advance(6)
    bench.connections["a"].ready()
    bench.connections["a"].list(model())
    bench.connections["a"].lose()
    bench.time.advance(0.12)
    assert not bench.connections["a"].has_ended


@pytest.mark.parametrize("status", [UNAUTHENTICATED, PERMISSION_DENIED])
def test_a_replica_that_rejects_the_credentials_is_connected_to_again(status: int) -> None:
    """Checks that the client reconnects: credentials belong to a connection, and may change."""
    bench = Bench()
    bench.join("a")
    first = bench.connections["a"]
    bench.time.advance(1)
    bench.look_up()
    first.lists[0].answer(Reply(status, "unknown token"))
    assert bench.part.stats.replicas == {KEY: 0}
    reason = f"ListModels failed with status {status}: unknown token"
    assert bench.part.reasons(KEY) == {("a", 1): reason}
    assert first.is_finished
    first.calls[0].answer()
    assert bench.replies[0].status == 0
    bench.time.advance(0.12)
    assert bench.connections["a"] is not first
    bench.connections["a"].ready()
    bench.connections["a"].list(model())
    assert bench.part.stats.replicas == {KEY: 1}


def test_a_replica_that_goes_on_rejecting_is_tried_with_backoff() -> None:
    bench = Bench()
    bench.part.set_addresses([("a", 1)])
    made = 0
    end_s = bench.time.now_s + 60
    last = None
    while bench.time.now_s < end_s:
        if (newest := bench.connections["a"]) is not last:
            made, last = made + 1, newest
            newest.ready()
            newest.lists[0].answer(Reply(UNAUTHENTICATED, "unknown token"))
        bench.time.advance(0.05)
    assert 12 <= made <= 35


def test_credentials_that_change_replace_connections_without_a_gap(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench()
    bench.join("a", "b")
    before = dict(bench.connections)
    bench.look_up()
    bench.part.renew()
    assert bench.connections["a"] is not before["a"]
    for host in "ab":
        assert not before[host].is_finished
        bench.connections[host].ready()
        assert not before[host].is_finished  # the shard may reject the new credentials
        bench.connections[host].list(model())
        assert before[host].is_finished
        assert bench.part.stats.replicas == {KEY: 2}
    (call,) = [call for one in before.values() for call in one.calls]
    call.answer()
    bench.look_up()
    bench.calls[0].answer()
    assert [reply.status for reply in bench.replies.values()] == [0, 0]
    for _ in range(12):
        bench.time.advance(1)
        bench.answer_polls()
    assert not [one for one in caplog.records if one.levelno > logging.INFO]


def test_rejected_credentials_leave_the_connections_and_are_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    bench = Bench()
    bench.join("a")
    first = bench.connections["a"]
    bench.part.renew()
    until_s = bench.time.now_s + 9
    newest = first
    while bench.time.now_s < until_s:
        if bench.connections["a"] is not newest:
            newest = bench.connections["a"]
            newest.ready()
            newest.lists[0].answer(Reply(UNAUTHENTICATED, "unknown token"))
        bench.time.advance(0.1)
        if first.lists:
            first.list(model())
        assert bench.part.stats.replicas == {KEY: 1}
    assert newest is not first
    assert caplog.records == []
    for _ in range(5):
        bench.time.advance(1)
        first.list(model())
    assert [record.message for record in caplog.records] == [
        "part 1 of 4: a:1 has not accepted the new credentials yet, connections keep the earlier "
        "ones: ListModels failed with status 16: unknown token"
    ]
    bench.connections["a"].ready()
    bench.connections["a"].list(model())
    assert first.is_finished
    assert bench.part.stats.replicas == {KEY: 1}


def test_a_replica_that_is_being_replaced_may_be_lost_removed_or_replaced_again() -> None:
    bench = Bench()
    bench.join("a")
    bench.part.renew()
    second = bench.connections["a"]
    bench.part.renew()
    third = bench.connections["a"]
    assert third is not second
    assert second.is_finished
    third.ready()
    third.list(model())
    assert bench.part.stats.replicas == {KEY: 1}
    bench.part.renew()
    fourth = bench.connections["a"]
    third.lose("reset")
    assert bench.part.stats.replicas == {KEY: 0}
    fourth.ready()
    fourth.list(model())
    assert bench.part.stats.replicas == {KEY: 1}
    bench.part.renew()
    bench.part.set_addresses([])
    assert bench.connections["a"].is_finished
    assert fourth.is_finished
    bench.time.advance(20)
    assert bench.part.stats.replicas == {KEY: 0}


def test_addresses_that_stay_keep_their_connections() -> None:
    bench = Bench()
    bench.join("a", "b")
    kept, gone = bench.connections["a"], bench.connections["b"]
    bench.look_up()
    bench.part.set_addresses([("a", 1), ("c", 1)])
    assert bench.connections["a"] is kept
    assert gone.is_finished
    assert bench.part.stats.replicas == {KEY: 1}
    bench.calls[0].answer()
    assert bench.replies[0].status == 0
    bench.part.close()
    assert kept.is_finished
    assert bench.connections["c"].is_finished
    bench.look_up()
    bench.time.advance(1)
    assert bench.replies[1].message.endswith("has no replica of dlrm@7: no address is known")


def test_reasons_are_cut() -> None:
    bench = Bench()
    bench.part.set_addresses([(f"h{number}", 1) for number in range(9)])
    text = bench.part.why_unavailable(KEY)
    assert "h3:1 connecting; 5 more" in text


# Choice


def test_the_less_busy_of_two_is_called() -> None:
    random.seed(3)
    bench = Bench()
    bench.join("a", "b", "c")
    bench.connections["a"].extra_in_flight = 1000
    for _ in range(300):
        bench.look_up()
    counts = Counter(call.host for call in bench.calls)
    assert counts["a"] == 0
    assert abs(counts["b"] - counts["c"]) < 20


# Failures


def test_a_lost_call_is_made_again_at_once() -> None:
    bench = Bench()
    bench.join("a", "b")
    bench.look_up()
    lost = bench.calls[0].connection
    lost.lose()
    (call,) = bench.calls
    assert call.connection is not lost
    call.answer()
    assert bench.replies[0].status == 0
    assert bench.part.stats.retries == 1


def test_lost_calls_need_no_budget_and_end_with_the_replicas() -> None:
    bench = Bench()
    for _ in range(30):
        bench.join("a", "b", "c")
        for _ in range(3):
            bench.look_up()
        for host in "abc":
            bench.connections[host].lose("killed")
        assert bench.calls == []
        bench.time.advance(10)
    assert bench.replies[0] == Reply(UNAVAILABLE, "part 1 of 4: killed", is_lost=True)
    assert bench.ended["unavailable"] == 90


def test_unavailable_is_retried_within_the_budget() -> None:
    bench = Bench()
    bench.join("a", "b")
    attempts = 0
    for _ in range(200):
        bench.look_up()
        while bench.calls:
            attempts += 1
            bench.calls[0].answer(Reply(UNAVAILABLE, "loading"))
    assert attempts <= 200 + 10 + 20
    assert bench.part.stats.retries == attempts - 200
    assert all(reply.message == "loading" for reply in bench.replies.values())


def test_overload_is_retried_once_and_the_longest_retry_after_returned() -> None:
    bench = Bench()
    bench.join("a", "b", "c")
    bench.look_up()
    bench.calls[0].answer(Reply(RESOURCE_EXHAUSTED, "full", retry_after_s=5))
    bench.calls[0].answer(OVERLOADED)
    assert bench.calls == []
    assert bench.replies[0] == Reply(RESOURCE_EXHAUSTED, "full", retry_after_s=5)
    bench.look_up()
    bench.calls[0].answer(OVERLOADED)
    bench.calls[0].connection.lose()
    assert len(bench.calls) == 1
    bench.calls[0].answer(Reply(UNAVAILABLE, "draining"))
    assert bench.replies[1] == OVERLOADED


def test_an_overloaded_part_gets_few_calls_more_than_look_ups() -> None:
    bench = Bench()
    bench.join("a", "b")
    for _ in range(500):
        bench.look_up()
        bench.time.advance(0.02)  # until a hedge, if the budget allows
        while bench.calls:
            bench.calls[0].answer(OVERLOADED)
        bench.answer_polls()
    stats = bench.part.stats
    assert bench.ended["overloaded"] == 500
    assert 500 * 1.1 < stats.attempts <= 500 * 1.2 + 2 * BURST
    assert stats.attempts == 500 + stats.hedges + stats.retries


def test_a_request_that_is_too_large_is_not_retried() -> None:
    """Checks rejections: an overloaded shard sends retry-after, but not for a large request."""
    bench = Bench()
    bench.join("a", "b")
    bench.look_up()
    too_large = Reply(RESOURCE_EXHAUSTED, "the message has 9 bytes, the limit is 8")
    bench.calls[0].answer(too_large)
    assert bench.calls == []
    assert bench.replies[0] == too_large
    assert bench.ended["error"] == 1
    assert bench.ended["overloaded"] == 0


def test_other_statuses_are_the_callers() -> None:
    bench = Bench()
    bench.join("a", "b")
    bench.look_up()
    bench.calls[0].answer(Reply(INTERNAL, "bug"))
    assert bench.replies[0] == Reply(INTERNAL, "bug")
    assert bench.ended["error"] == 1


def test_the_outcomes_are_those_that_are_counted() -> None:
    replies = [Reply(status, "", retry_after_s=1) for status in range(STATUS_MAX + 1)]
    assert {outcome_of(reply) for reply in replies} == set(SHARD_OUTCOMES)


# Hedges


def test_a_slow_call_is_hedged_and_the_loser_cancelled() -> None:
    bench = Bench()
    bench.join("a", "b")
    bench.learn(0.002)
    bench.look_up()
    (first,) = bench.calls
    bench.time.advance(0.0035)
    assert bench.calls == [first]
    bench.time.advance(0.003)
    (second,) = [call for call in bench.calls if call is not first]
    assert second.connection is not first.connection
    second.answer()
    assert first.is_cancelled
    assert bench.replies[0].status == 0
    assert bench.part.stats.hedges == 1
    bench.time.advance(1)


def test_a_call_is_not_hedged_within_a_millisecond() -> None:
    bench = Bench()
    bench.join("a", "b")
    bench.learn(20e-6)
    bench.look_up()
    bench.time.advance(0.00095)
    assert len(bench.calls) == 1
    bench.time.advance(0.0011)
    assert len(bench.calls) == 2


def test_hedges_have_a_share() -> None:
    bench = Bench(PartOptions(hedge_share=0.1))
    bench.join("a", "b")
    for _ in range(300):
        bench.learn(0.002)
        bench.look_up()
        bench.time.advance(0.006)
        for call in bench.calls:
            if not call.is_cancelled:
                call.answer()
        bench.answer_polls()
    assert 30 <= bench.part.stats.hedges <= 300 * 0.1 + 10
    assert len(bench.replies) == 300


def test_no_hedges_without_a_share() -> None:
    bench = Bench(PartOptions(hedge_share=0))
    bench.join("a", "b")
    bench.look_up()
    bench.time.advance(0.04)
    assert len(bench.calls) == 1


# Hung replicas


def test_a_silent_replica_is_avoided_until_it_answers() -> None:
    bench = Bench(PartOptions(hedge_share=0))
    bench.join("a", "b")
    bench.learn(0.001)
    for _ in range(40):
        bench.look_up()
    bench.time.advance(0.001)
    for call in bench.connections["b"].calls[:]:
        call.answer()
    hung = len(bench.connections["a"].calls)
    assert hung > 5
    bench.time.advance(0.055)
    assert len(bench.connections["b"].calls) == hung, "all are asked elsewhere, without a budget"
    assert bench.connections["a"].pings == 1
    assert bench.part.stats.hung == hung
    for call in bench.connections["b"].calls[:]:
        call.answer()
    assert len(bench.replies) == 40
    assert bench.connections["a"].calls == []
    for _ in range(20):
        bench.look_up()
    assert {call.host for call in bench.calls} == {"b"}
    bench.connections["a"].last_received_s = bench.time.now_s + 1e-9
    for _ in range(20):
        bench.look_up()
    assert {call.host for call in bench.calls} == {"a", "b"}


def test_a_hung_replica_is_used_where_there_is_no_other() -> None:
    bench = Bench()
    bench.join("a", "b")
    bench.learn(0.001)
    bench.look_up()
    hung = bench.calls[0].connection
    other = next(one for one in bench.connections.values() if one is not hung)
    bench.time.advance(0.2)
    other.lose()
    assert 0 not in bench.replies
    bench.look_up()
    assert [call.connection for call in bench.calls] == [hung, hung]


def test_calls_of_silent_replicas_have_a_budget() -> None:
    bench = Bench(PartOptions(hedge_share=0))
    bench.join("a", "b")
    bench.learn(0.001)
    for _ in range(200):
        bench.look_up()
    bench.time.advance(0.4)
    assert {call.host for call in bench.calls} == {"a", "b"}
    assert 200 < bench.part.stats.attempts <= 200 * 1.1 + BURST + 2
    for call in bench.calls[:]:
        if not call.is_cancelled:
            call.answer()
    assert len(bench.replies) == 200


def test_a_busy_router_takes_no_replica_for_silent() -> None:
    """Checks replies that have arrived, but that the event loop has not read yet."""
    bench = Bench()
    bench.join("a", "b")
    bench.learn(0.001)
    for _ in range(10):
        bench.look_up()
    bench.time.now_s += 0.4
    bench.time.advance(0)
    for call in bench.calls[:]:
        call.answer()
    bench.time.advance(1)
    stats = bench.part.stats
    assert (stats.attempts, stats.hung, stats.hedges, bench.ended["ok"]) == (10, 0, 0, 10)


def test_a_slow_replica_that_answers_others_is_not_hung() -> None:
    bench = Bench(PartOptions(hedge_share=0))
    bench.join("a", "b")
    bench.learn(0.001)
    asked = 0
    for _ in range(100):
        bench.look_up()
        (call,) = bench.calls
        bench.time.advance(0.04)
        call.connection.last_received_s = bench.time.now_s
        bench.time.advance(0.03)
        asked += len(bench.calls)
        bench.calls[0].answer()
        bench.answer_polls()
    assert bench.part.stats.hung == 0
    assert 100 < asked <= 100 + 20, "within the budget of retries"


# Deadlines


def test_the_deadline_ends_all_calls() -> None:
    bench = Bench()
    bench.join("a", "b")
    bench.look_up(0.03)
    (first,) = bench.calls
    assert first.timeout_s == pytest.approx(0.03)
    bench.time.advance(0.02)
    assert min(call.timeout_s for call in bench.calls) < 0.025
    bench.time.advance(0.02)
    assert bench.replies[0] == Reply(DEADLINE_EXCEEDED, "part 1 of 4: the deadline has passed")
    assert bench.calls == []
    bench.look_up(-1)
    bench.time.advance(0.01)
    assert bench.replies[1].status == DEADLINE_EXCEEDED


def test_one_call_may_take_the_call_timeout() -> None:
    bench = Bench(PartOptions(call_timeout_s=0.02, hedge_share=0))
    bench.join("a", "b")
    bench.look_up(1)
    (first,) = bench.calls
    assert first.timeout_s == 0.02
    bench.time.advance(0.022)
    assert first.is_cancelled
    (second,) = bench.calls
    assert second.connection is not first.connection
    bench.time.advance(0.022)
    text = "part 1 of 4: no response within 0.02 s"
    assert bench.replies[0] == Reply(DEADLINE_EXCEEDED, text)


# Counts


def test_calls_and_bytes_are_counted() -> None:
    bench = Bench()
    bench.join("a")
    bench.look_up()
    bench.look_up()
    stats = bench.part.stats
    assert stats.in_flight == 2
    bench.calls[0].answer()
    bench.calls[0].answer()
    bench.look_up(message=b"m" * 100)
    bench.calls[0].answer()
    assert stats.in_flight == 0
    assert (stats.bytes_sent, stats.bytes_received) == (102, 3)
    assert bench.ended["ok"] == 3


steps = st.lists(
    st.one_of(
        st.tuples(st.just("look up"), st.floats(0, 1)),
        st.tuples(
            st.sampled_from(["answer", "reject", "unavailable", "fail", "lose", "join"]),
            st.integers(0, 5),
        ),
        st.tuples(st.just("advance"), st.floats(0, 0.3)),
        st.tuples(st.just("addresses"), st.sampled_from(["abc", "ab", "b", "", "cd"])),
    ),
    max_size=60,
)
REPLIES = {
    "answer": Reply(0, "", b"x"),
    "reject": OVERLOADED,
    "unavailable": Reply(UNAVAILABLE, "draining"),
    "fail": Reply(INTERNAL, "bug"),
}


@given(steps, st.integers(0, 1000))
def test_every_look_up_ends_once(steps: list[tuple[str, float]], seed: int) -> None:
    random.seed(seed)
    bench = Bench(PartOptions(call_timeout_s=0.2))
    bench.join("a", "b", "c")
    for step, value in steps:
        calls = bench.calls
        connections = [one for one in bench.connections.values() if one.is_ready]
        if step == "look up":
            bench.look_up(value)
        elif step == "advance":
            bench.time.advance(value)
        elif step == "addresses":
            bench.part.set_addresses([(host, 1) for host in str(value)])
        elif step == "join":
            for connection in bench.connections.values():
                if not (connection.is_ready or connection.has_ended or connection.is_finished):
                    connection.ready()
            bench.answer_polls()
        elif step == "lose" and connections:
            connections[int(value) % len(connections)].lose()
        elif step in REPLIES and calls:
            calls[int(value) % len(calls)].answer(REPLIES[step])
    bench.time.advance(2)
    assert set(bench.replies) == set(range(bench.looked_up))
    assert bench.part.stats.in_flight == 0
    assert bench.calls == []
    assert sum(bench.ended.values()) == bench.looked_up
