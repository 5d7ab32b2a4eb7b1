"""Tests of replica choice, retries, deadlines and counts, with fake shards and a fake clock."""

import random
import weakref
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_client.fake_shards import KEY, OVERLOADED, Bench

from embedserve.metrics.shard_metrics import SHARD_OUTCOMES
from embedserve.shard_client.part_call import outcome_of
from embedserve.shard_client.part_client import PartOptions
from embedserve.shard_client.reply import (
    DEADLINE_EXCEEDED,
    INTERNAL,
    RESOURCE_EXHAUSTED,
    STATUS_MAX,
    UNAVAILABLE,
    Reply,
)
from embedserve.shard_client.share_budget import BURST

# Choice


def test_less_busy_of_two_random_replicas_is_called() -> None:
    random.seed(3)
    bench = Bench("abc")
    bench.connections["a"].extra_in_flight = 1000
    for _ in range(300):
        bench.look_up()
    counts = Counter(call.host for call in bench.calls)
    assert counts["a"] == 0
    assert abs(counts["b"] - counts["c"]) < 20


# Failures


def test_lost_call_is_retried_immediately() -> None:
    bench = Bench("ab")
    bench.look_up()
    lost_connection = bench.calls[0].connection
    lost_connection.lose()
    (call,) = bench.calls
    assert call.connection is not lost_connection
    call.answer()
    assert bench.replies[0].status == 0
    assert bench.part.stats.retries == 1


def test_lost_calls_are_retried_without_a_budget_until_no_replica_is_left() -> None:
    bench = Bench()
    for _ in range(30):
        bench.join("a", "b", "c")
        for _ in range(3):
            bench.look_up()
        for host in "abc":
            assert len(bench.calls) == 3
            bench.connections[host].lose("killed")
        assert bench.calls == []
        bench.time.advance(10)
    assert bench.replies[0] == Reply(UNAVAILABLE, "part 1 of 4: killed", is_lost=True)
    assert bench.outcomes["unavailable"] == 90


def test_unavailable_is_retried_within_the_budget() -> None:
    bench = Bench("ab")
    attempts = 0
    for _ in range(200):
        bench.look_up()
        while bench.calls:
            attempts += 1
            bench.calls[0].answer(Reply(UNAVAILABLE, "loading"))
    assert 200 + BURST < attempts <= 200 + BURST + 20
    assert bench.part.stats.retries == attempts - 200
    assert all(reply.message == "loading" for reply in bench.replies.values())


def test_overload_is_retried_once_and_the_longest_retry_after_is_returned() -> None:
    longer = Reply(RESOURCE_EXHAUSTED, "full", retry_after_s=5)
    for replies in ((longer, OVERLOADED), (OVERLOADED, longer)):
        bench = Bench("abc")
        bench.look_up()
        for reply in replies:
            bench.calls[0].answer(reply)
        assert bench.calls == []
        assert bench.replies[0] == longer


def test_overload_is_returned_rather_than_later_failures() -> None:
    bench = Bench("abc")
    bench.look_up()
    bench.calls[0].answer(OVERLOADED)
    bench.calls[0].connection.lose()
    assert len(bench.calls) == 1
    bench.calls[0].answer(Reply(UNAVAILABLE, "draining", retry_after_s=9))
    assert bench.replies[0] == OVERLOADED


def test_latest_failure_is_returned() -> None:
    bench = Bench("ab")
    bench.look_up()
    bench.calls[0].answer(Reply(UNAVAILABLE, "draining"))
    bench.calls[0].answer(Reply(UNAVAILABLE, "loading"))
    assert bench.replies[0] == Reply(UNAVAILABLE, "loading")


def test_overloaded_part_gets_few_more_calls_than_lookups() -> None:
    bench = Bench("ab")
    attempts = 0
    for _ in range(500):
        bench.look_up()
        bench.time.advance(0.02)  # until a hedge, if the budget allows
        while bench.calls:
            attempts += 1
            bench.calls[0].answer(OVERLOADED)
        bench.answer_polls()
    stats = bench.part.stats
    assert bench.outcomes["overloaded"] == 500
    assert 500 * 1.1 < attempts <= 500 * 1.2 + 2 * BURST
    assert attempts == 500 + stats.hedges + stats.retries


def test_too_large_request_is_not_retried() -> None:
    """Checks rejections: an overloaded shard sends retry-after, but not for a large request."""
    bench = Bench("ab")
    bench.look_up()
    too_large = Reply(RESOURCE_EXHAUSTED, "the message has 9 bytes, the limit is 8")
    bench.calls[0].answer(too_large)
    assert bench.calls == []
    assert bench.replies[0] == too_large
    assert bench.outcomes["error"] == 1
    assert bench.outcomes["overloaded"] == 0


def test_other_statuses_are_returned_to_the_caller() -> None:
    bench = Bench("ab")
    bench.look_up()
    bench.calls[0].answer(Reply(INTERNAL, "bug"))
    assert bench.replies[0] == Reply(INTERNAL, "bug")
    assert bench.outcomes["error"] == 1


def test_every_status_has_a_counted_outcome() -> None:
    replies = [Reply(status, "", retry_after_s=1) for status in range(STATUS_MAX + 1)]
    assert {outcome_of(reply) for reply in replies} == set(SHARD_OUTCOMES)


# Deadlines


def test_deadline_ends_all_calls_of_a_lookup() -> None:
    bench = Bench("ab")
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


def test_call_that_fails_after_the_deadline_is_not_retried() -> None:
    bench = Bench("ab")
    bench.look_up(0.03)
    bench.time.now_s += 0.03  # the timer is late
    bench.calls[0].answer(Reply(UNAVAILABLE, "draining"))
    assert bench.replies[0] == Reply(DEADLINE_EXCEEDED, "part 1 of 4: the deadline has passed")
    assert bench.calls == []


def test_each_call_ends_at_the_call_timeout() -> None:
    bench = Bench("ab", PartOptions(call_timeout_s=0.02, hedge_share=0))
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


def test_late_replica_counts_before_a_lost_one() -> None:
    for is_lost_first in (False, True):
        bench = Bench("ab", PartOptions(call_timeout_s=0.02, hedge_share=0))
        bench.look_up(1)
        if is_lost_first:
            bench.calls[0].connection.lose()
        bench.time.advance(0.022)
        if not is_lost_first:
            bench.calls[0].connection.lose()
        assert bench.calls == []
        text = "part 1 of 4: no response within 0.02 s"
        assert bench.replies == {0: Reply(DEADLINE_EXCEEDED, text)}


# Counts


def test_calls_their_latencies_and_bytes_are_counted() -> None:
    bench = Bench("a")
    bench.look_up()
    bench.look_up()
    stats = bench.part.stats
    bench.time.advance(0.002)
    bench.calls[0].answer()
    bench.calls[0].answer()
    bench.look_up(message=b"m" * 100)
    bench.calls[0].answer()
    assert (stats.bytes_sent, stats.bytes_received) == (102, 3)
    assert stats.total_s == pytest.approx(0.004)
    assert bench.outcomes["ok"] == 3


def test_message_of_an_ended_lookup_is_freed() -> None:
    """Checks that timers, which keep a lookup for some time, do not keep its message."""

    class Message(list[bytes]):
        pass

    bench = Bench("a")
    message = Message([b"m"])
    bench.part.look_up(KEY, message, bench.time.now_s + 10, lambda reply: None)
    freed = weakref.ref(message)
    del message
    bench.calls[0].answer()
    assert freed() is None


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
def test_every_lookup_ends_exactly_once(steps: list[tuple[str, float]], seed: int) -> None:
    random.seed(seed)
    bench = Bench("abc", PartOptions(call_timeout_s=0.2))
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
    assert bench.calls == []
    assert sum(bench.outcomes.values()) == bench.looked_up
