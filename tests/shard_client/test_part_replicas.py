"""Tests of the replicas of a part: joining, leaving, reconnecting, and new credentials."""

import logging

import pytest
from shard_client.fake_shards import FINGERPRINT, KEY, OVERLOADED, PART, PARTS, Bench, model

from embedserve.model_names import VersionKey
from embedserve.shard_client.reply import (
    DEADLINE_EXCEEDED,
    PERMISSION_DENIED,
    UNAUTHENTICATED,
    UNAVAILABLE,
    Reply,
    lost,
    status_name,
)


def test_replica_joins_once_it_lists_the_version(caplog: pytest.LogCaptureFixture) -> None:
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
    bench.part.expect(VersionKey("dlrm", 6), FINGERPRINT)
    assert bench.part.stats.replicas == {KEY: 1, VersionKey("dlrm", 6): 1}
    bench.part.forget(KEY)
    assert bench.part.stats.replicas == {VersionKey("dlrm", 6): 1}
    bench.look_up()
    bench.time.advance(0.01)
    connection.lose("reset")
    assert bench.part.stats.replicas == {VersionKey("dlrm", 6): 0}
    assert bench.replies[0] == lost(
        "part 1 of 4 has no replica of dlrm@7: a:1 dlrm@7 is not expected"
    )
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "part 1 of 4: a:1 joined for dlrm@7"),
        ("INFO", "part 1 of 4: a:1 joined for dlrm@6"),
        ("WARNING", "part 1 of 4: a:1 left dlrm@6: reset"),
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
def test_replica_of_another_part_or_fingerprint_does_not_join(listed: object, reason: str) -> None:
    bench = Bench()
    bench.part.set_addresses([("a", 1)])
    bench.connections["a"].ready()
    bench.connections["a"].list(listed)  # type: ignore[arg-type]
    assert bench.part.reasons(KEY) == {("a", 1): reason}
    bench.look_up()
    bench.time.advance(0.01)
    assert bench.replies[0] == lost(f"part 1 of 4 has no replica of dlrm@7: a:1 {reason}")


def test_replica_that_stops_serving_the_version_leaves() -> None:
    bench = Bench("a")
    for reply in (OVERLOADED, Reply(DEADLINE_EXCEEDED, "late"), lost("refused")):
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
    assert bench.part.reasons(KEY) == {("a", 1): "ListModels failed with UNAVAILABLE: draining"}


def test_replica_that_fails_to_list_models_leaves() -> None:
    bench = Bench("ab")
    for _ in range(7):
        bench.time.advance(1)
        if bench.connections["b"].lists:
            bench.connections["b"].list(model())
        if bench.part.stats.replicas == {KEY: 2}:
            (unanswered,) = bench.connections["a"].lists
    assert bench.part.reasons(KEY) == {("a", 1): "does not answer ListModels"}
    assert unanswered.is_cancelled
    bench.time.advance(1)
    bench.connections["a"].lists[0].answer(Reply(0, "", b"\xff"))
    assert "malformed response" in bench.part.reasons(KEY)["a", 1]
    bench.time.advance(1)
    bench.connections["a"].list(model())
    assert bench.part.stats.replicas == {KEY: 2}
    bench.time.advance(1)
    bench.connections["a"].lists[0].answer(Reply(0, "", b"\xff"))
    assert bench.part.stats.replicas == {KEY: 1}


def test_lost_connections_are_reopened_with_backoff() -> None:
    bench = Bench("a")
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
    assert 0.2 <= delays[2] <= 0.42
    assert 2.5 <= delays[-1] <= 5.02
    bench.time.advance(6)
    bench.connections["a"].ready()
    bench.connections["a"].list(model())
    bench.connections["a"].lose()
    bench.time.advance(0.12)
    assert not bench.connections["a"].has_ended


def test_connection_that_has_lasted_is_reopened_at_once() -> None:
    bench = Bench("a")
    bench.time.advance(1)
    bench.answer_polls()
    aged = bench.connections["a"]
    aged.lose("the shard closes the connection")
    bench.time.advance(0)
    following = bench.connections["a"]
    assert following is not aged
    following.ready()
    following.list(model())
    following.lose("the shard closes the connection")
    bench.time.advance(0.04)
    assert bench.connections["a"] is following  # a shard that keeps closing is not called at once


def test_shard_that_has_ended_is_not_called_at_once_again() -> None:
    bench = Bench("a")
    bench.time.advance(1)
    bench.answer_polls()
    bench.connections["a"].lose("the shard closes the connection")
    bench.time.advance(0)
    rejected = bench.connections["a"]
    rejected.lose("connection refused")
    bench.time.advance(0.04)
    assert bench.connections["a"] is rejected


def test_replica_may_be_removed_while_it_reconnects() -> None:
    bench = Bench("a")
    first = bench.connections["a"]
    first.lose("reset")
    bench.time.advance(0.12)
    bench.part.set_addresses([])
    assert bench.connections["a"] is not first
    assert bench.connections["a"].is_finished


def test_connection_that_drains_lists_no_more_models() -> None:
    bench = Bench("a")
    bench.time.advance(1)
    draining = bench.connections["a"]
    assert draining.lists
    draining.on_end("the shard closes the connection")
    assert not draining.lists


@pytest.mark.parametrize("status", [UNAUTHENTICATED, PERMISSION_DENIED])
def test_replica_that_rejects_the_credentials_is_reconnected(status: int) -> None:
    """Checks that the client reconnects: credentials belong to a connection, and may change."""
    bench = Bench("a")
    first = bench.connections["a"]
    bench.time.advance(1)
    bench.look_up()
    first.lists[0].answer(Reply(status, "unknown token"))
    assert bench.part.stats.replicas == {KEY: 0}
    reason = f"ListModels failed with {status_name(status)}: unknown token"
    assert bench.part.reasons(KEY) == {("a", 1): reason}
    assert first.is_finished
    first.calls[0].answer()
    assert bench.replies[0].status == 0
    bench.time.advance(0.12)
    assert bench.connections["a"] is not first
    bench.connections["a"].ready()
    bench.connections["a"].list(model())
    assert bench.part.stats.replicas == {KEY: 1}


def test_replica_that_keeps_rejecting_is_retried_with_backoff() -> None:
    bench = Bench()
    bench.part.set_addresses([("a", 1)])
    connects = 0
    end_s = bench.time.now_s + 60
    last = None
    while bench.time.now_s < end_s:
        if (newest := bench.connections["a"]) is not last:
            connects, last = connects + 1, newest
            newest.ready()
            newest.lists[0].answer(Reply(UNAUTHENTICATED, "unknown token"))
        bench.time.advance(0.05)
    assert 12 <= connects <= 35


def test_changed_credentials_replace_connections_without_a_gap(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench("ab")
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


def test_rejected_new_credentials_keep_old_connections_and_are_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    bench = Bench("a")
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
        "ones: ListModels failed with UNAUTHENTICATED: unknown token"
    ]
    bench.connections["a"].ready()
    bench.connections["a"].list(model())
    assert first.is_finished
    assert bench.part.stats.replicas == {KEY: 1}


def test_connection_being_replaced_may_be_lost_removed_or_replaced_again() -> None:
    bench = Bench("a")
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


def test_unchanged_addresses_keep_their_connections(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench("ab")
    kept_connection, removed_connection = bench.connections["a"], bench.connections["b"]
    caplog.set_level(logging.INFO)
    bench.time.advance(1)
    assert removed_connection.lists
    bench.look_up()
    bench.part.set_addresses([("a", 1), ("c", 1)])
    assert bench.connections["a"] is kept_connection
    assert removed_connection.is_finished
    assert not removed_connection.lists  # it waits only for lookups
    assert bench.part.stats.replicas == {KEY: 1}
    bench.calls[0].answer()
    assert bench.replies[0].status == 0
    bench.part.close()
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "part 1 of 4: b:1 left dlrm@7: its address is gone")
    ]
    assert kept_connection.is_finished
    assert bench.connections["c"].is_finished
    bench.look_up()
    bench.time.advance(1)
    assert bench.replies[1].message.endswith("has no replica of dlrm@7: no address is known")


def test_last_replicas_serve_until_one_of_the_new_addresses_does() -> None:
    bench = Bench("ab")
    first, second = bench.connections["a"], bench.connections["b"]
    bench.part.set_addresses([("c", 1), ("d", 1)])
    assert bench.part.stats.replicas == {KEY: 2}
    bench.connections["c"].ready()
    bench.connections["c"].list(model(part=0))
    second.lose("reset")
    bench.time.advance(1)
    assert bench.connections["b"] is second
    assert bench.part.stats.replicas == {KEY: 1}
    bench.connections["d"].ready()
    bench.connections["d"].list(model())
    assert first.is_finished
    assert bench.part.stats.replicas == {KEY: 1}
    bench.part.set_addresses([("c", 1)])
    assert bench.part.stats.replicas == {KEY: 1}
    bench.part.forget(KEY)
    assert bench.connections["d"].is_finished


@pytest.mark.parametrize("others", ["", "b"])
def test_lookups_that_begin_while_a_replica_closes_are_not_its_own(others: str) -> None:
    """Calls that wait for a stream fail while their connection finishes, and batches that wait for
    memory begin."""
    bench = Bench("a" + others)
    first = bench.connections["a"]
    finish = first.finish
    begun: list[int] = []

    def finish_and_begin(reason: str) -> None:
        finish(reason)
        begun.extend(bench.look_up() for _ in range(8))

    first.finish = finish_and_begin  # type: ignore[method-assign]
    bench.part.set_addresses([(host, 1) for host in others])
    assert [call.host for call in bench.calls] == ["b"] * len(bench.calls)
    assert len(bench.calls) == (8 if others else 0)
    bench.time.advance(0.01)
    assert all(bench.replies[number].is_lost for number in (begun if not others else ()))


def test_unavailability_reasons_are_truncated() -> None:
    bench = Bench()
    for count, end in ((4, "h3:1 connecting"), (9, "h3:1 connecting; 5 more")):
        bench.part.set_addresses([(f"h{number}", 1) for number in range(count)])
        assert bench.part.why_unavailable(KEY).endswith(end)
