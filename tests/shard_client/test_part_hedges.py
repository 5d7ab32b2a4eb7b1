"""Tests of hedged calls and hung replicas of a part, with fake shards and a fake clock."""

from shard_client.fake_shards import Bench

from embedserve.shard_client.part_client import PartOptions
from embedserve.shard_client.recent_latency import SAMPLES_PER_UPDATE
from embedserve.shard_client.share_budget import BURST

# Hedges


def test_slow_call_is_hedged_and_the_loser_cancelled() -> None:
    bench = Bench("ab")
    bench.add_latencies(0.002)
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


def test_call_is_not_hedged_within_a_millisecond() -> None:
    bench = Bench("ab")
    bench.add_latencies(20e-6)
    bench.look_up()
    bench.time.advance(0.00095)
    assert len(bench.calls) == 1
    bench.time.advance(0.0011)
    assert len(bench.calls) == 2


def test_hedges_stay_within_their_share() -> None:
    bench = Bench("ab", PartOptions(hedge_share=0.1))
    for _ in range(300):
        bench.add_latencies(0.002)
        bench.look_up()
        bench.time.advance(0.006)
        for call in bench.calls:
            if not call.is_cancelled:
                call.answer()
        bench.answer_polls()
    assert 30 <= bench.part.stats.hedges <= 300 * 0.1 + 10
    assert len(bench.replies) == 300


def test_no_hedges_with_a_share_of_zero() -> None:
    bench = Bench("ab", PartOptions(hedge_share=0))
    bench.look_up()
    bench.time.advance(0.04)
    assert len(bench.calls) == 1


def test_slow_call_that_its_hedge_overtakes_counts_as_slow() -> None:
    bench = Bench("ab", PartOptions(hedge_share=1))
    bench.add_latencies(0.002)
    before_s = bench.part.recent.hedge_s
    for _ in range(SAMPLES_PER_UPDATE // 2):
        bench.look_up()
        (first,) = bench.calls
        bench.time.advance(0.006)
        (hedge,) = [call for call in bench.calls if call is not first]
        hedge.answer()
    assert bench.part.recent.hedge_s > before_s


def test_call_without_another_replica_is_not_hedged() -> None:
    bench = Bench("a")
    bench.look_up()
    bench.time.advance(0.04)
    assert (len(bench.calls), bench.part.stats.hedges) == (1, 0)


# Hung replicas


def assert_avoided_until_it_sends_something(bench: Bench) -> None:
    """Asserts that replica a, which has been silent, is not called before it sends something."""
    for _ in range(20):
        bench.look_up()
    assert {call.host for call in bench.calls} == {"b"}
    bench.connections["a"].last_received_s = bench.time.now_s + 1e-9
    for _ in range(20):
        bench.look_up()
    assert {call.host for call in bench.calls} == {"a", "b"}


def test_silent_replica_is_avoided_until_it_responds() -> None:
    bench = Bench("ab", PartOptions(hedge_share=0))
    bench.add_latencies(0.001)
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
    assert_avoided_until_it_sends_something(bench)


def test_silent_replica_is_avoided_although_no_deadline_lets_a_call_hang() -> None:
    bench = Bench("ab", PartOptions(call_timeout_s=0.02, hedge_share=0))
    bench.add_latencies(0.001)
    silent = bench.connections["a"]
    for _ in range(20):
        for _ in range(10):
            bench.look_up()
        for call in bench.connections["b"].calls[:]:
            call.answer()
        bench.time.advance(0.02)
    assert silent.pings == 1
    for call in bench.connections["b"].calls[:]:
        call.answer()
    assert_avoided_until_it_sends_something(bench)


def test_replica_that_sends_something_between_given_up_calls_is_not_hung() -> None:
    bench = Bench("ab", PartOptions(call_timeout_s=0.02, hedge_share=0))
    bench.add_latencies(0.001)
    for _ in range(20):
        bench.look_up()
        for connection in bench.connections.values():
            connection.last_received_s = bench.time.now_s
        bench.time.advance(0.02)
    assert [connection.pings for connection in bench.connections.values()] == [0, 0]


def test_hung_replica_is_used_if_it_is_the_only_one() -> None:
    bench = Bench("ab")
    bench.add_latencies(0.001)
    bench.look_up()
    hung = bench.calls[0].connection
    other = next(one for one in bench.connections.values() if one is not hung)
    bench.time.advance(0.2)
    other.lose()
    assert 0 not in bench.replies
    bench.look_up()
    assert [call.connection for call in bench.calls] == [hung, hung]


def test_slow_call_is_not_repeated_at_a_hung_replica() -> None:
    bench = Bench("ab")
    bench.add_latencies(0.001)
    while bench.part.hedges.try_take():
        pass
    bench.look_up()
    (hung,) = bench.calls
    bench.time.advance(0.06)
    (repeated,) = [call for call in bench.calls if call is not hung]
    repeated.answer()
    for _ in range(20):
        bench.part.hedges.earn()
    bench.look_up()
    bench.time.advance(0.04)
    repeated.connection.last_received_s = bench.time.now_s  # it answers other calls
    bench.time.advance(0.03)
    assert [call.connection for call in bench.calls] == [repeated.connection]


def test_hung_call_is_repeated_once_without_a_budget() -> None:
    bench = Bench("abc", PartOptions(hedge_share=0))
    bench.add_latencies(0.001)
    while bench.part.retries.try_take():
        pass
    bench.look_up()
    (hung,) = bench.calls
    bench.time.advance(0.06)
    (repeated,) = [call for call in bench.calls if call is not hung]
    for _ in range(20):
        repeated.connection.last_received_s = bench.time.now_s  # it answers other calls
        bench.time.advance(0.01)
    assert len(bench.calls) == 2
    repeated.answer()
    assert hung.is_cancelled


def test_repeated_calls_of_silent_replicas_stay_within_a_budget() -> None:
    bench = Bench("ab", PartOptions(hedge_share=0))
    bench.add_latencies(0.001)
    for _ in range(200):
        bench.look_up()
    bench.time.advance(0.4)
    assert {call.host for call in bench.calls} == {"a", "b"}
    assert 200 < len(bench.calls) <= 200 * 1.1 + BURST + 2
    for call in bench.calls[:]:
        if not call.is_cancelled:
            call.answer()
    assert len(bench.replies) == 200


def test_busy_event_loop_does_not_mark_replicas_as_hung() -> None:
    """Checks replies that have arrived, but that the event loop has not read yet."""
    bench = Bench("ab")
    bench.add_latencies(0.001)
    for _ in range(10):
        bench.look_up()
    bench.time.now_s += 0.4
    bench.time.advance(0)
    calls = bench.calls
    for call in calls:
        call.answer()
    bench.time.advance(1)
    stats = bench.part.stats
    assert (len(calls), stats.hung, stats.hedges, bench.outcomes["ok"]) == (10, 0, 0, 10)


def test_slow_replica_that_responds_to_other_calls_is_not_hung() -> None:
    bench = Bench("ab", PartOptions(hedge_share=0))
    bench.add_latencies(0.001)
    attempts = 0
    for _ in range(100):
        bench.look_up()
        (call,) = bench.calls
        bench.time.advance(0.04)
        call.connection.last_received_s = bench.time.now_s
        bench.time.advance(0.03)
        attempts += len(bench.calls)
        bench.calls[0].answer()
        bench.answer_polls()
    assert bench.part.stats.hung == 0
    assert [one.pings for one in bench.connections.values()] == [0, 0]
    assert 100 < attempts <= 100 + 20, "within the budget of retries"
    assert bench.part.stats.retries == attempts - 100


def test_hung_call_is_repeated_once_another_replica_joins() -> None:
    bench = Bench("a")
    bench.add_latencies(0.001)
    bench.look_up()
    bench.time.advance(0.06)
    bench.join("a", "b")
    bench.time.advance(0.06)
    assert [call.host for call in bench.calls] == ["a", "b"]


def test_slow_call_is_repeated_once_the_budget_allows_it() -> None:
    bench = Bench("ab", PartOptions(hedge_share=0))
    bench.add_latencies(0.001)
    while bench.part.retries.try_take():
        pass
    bench.look_up()
    (slow,) = bench.calls
    for count in (1, 2):
        bench.time.advance(0.04)
        slow.connection.last_received_s = bench.time.now_s  # it answers other calls
        bench.time.advance(0.015)
        assert len(bench.calls) == count
        for _ in range(10):
            bench.part.retries.earn()
