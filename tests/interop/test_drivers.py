"""Tests of @grpc/grpc-js and grpc-go: each makes the same calls over one connection."""

from __future__ import annotations

import grpc
import pytest
from interop.drivers import Call, Driver, go_driver, node_driver
from interop.lookups import (
    WRONG,
    WRONG_FIELD,
    large_answer,
    large_request,
    lookup,
    lookups,
)
from interop.tools import tool

OK = grpc.StatusCode.OK
DRIVERS = {"grpc-js": node_driver, "grpc-go": go_driver}


@pytest.fixture(scope="module", params=list(DRIVERS))
def driver(request: pytest.FixtureRequest) -> Driver:
    return DRIVERS[request.param]()


def test_unary_calls_at_once(driver: Driver, target: str) -> None:
    asked = lookups(300)
    ended = driver(target, *(Call("Embed", [one]) for one in asked))
    assert [(one.code, one.answers) for one in ended] == [(OK, [one.answer]) for one in asked]


def test_streams_pipelined_and_in_turns(driver: Driver, target: str) -> None:
    asked = lookups(300)
    calls = [Call("EmbedStream", asked), Call("EmbedStream", asked[:50], in_turns=True)]
    pipelined, in_turns = driver(target, *calls)
    assert (pipelined.code, in_turns.code) == (OK, OK)
    assert pipelined.answers == [one.answer for one in asked]
    assert in_turns.answers == [one.answer for one in asked[:50]]


@pytest.mark.parametrize("gzip", [False, True], ids=["plain", "gzip"])
def test_large_messages_and_small_ones(driver: Driver, target: str, gzip: bool) -> None:
    asked = [large_answer(), lookup(1), large_request(), lookup(2)]
    calls = [Call("EmbedStream", asked), *(Call("Embed", [one]) for one in asked)]
    stream, *unary = driver(target, *calls, gzip=gzip)
    assert stream.code is OK
    assert stream.answers == [one.answer for one in asked]
    assert [(one.code, one.answers) for one in unary] == [(OK, [one.answer]) for one in asked]


def test_errors_have_their_status_message_and_field(driver: Driver, target: str) -> None:
    asked = [lookup(1), WRONG, lookup(2)]
    unary, stream = driver(target, Call("Embed", [WRONG]), Call("EmbedStream", asked))
    assert unary.code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{WRONG_FIELD} is 500" in unary.message
    assert unary.trailers["embedserve-field"] == WRONG_FIELD
    assert unary.answers == []
    first, wrong, last = stream.answers
    assert (stream.code, first, last) == (OK, asked[0].answer, asked[2].answer)
    assert (wrong.error.code, wrong.error.field) == ("INVALID_ARGUMENT", WRONG_FIELD)


def test_metadata_of_every_call_its_own(driver: Driver, target: str) -> None:
    asked = lookups(100)
    calls = [
        Call("Embed", [one], metadata={f"x-key-{number}": "v" * 300, "x-trace": f"{number:032x}"})
        for number, one in enumerate(asked)
    ]
    assert [one.answers for one in driver(target, *calls)] == [[one.answer] for one in asked]


def test_a_short_deadline_passes_or_is_met(driver: Driver, target: str) -> None:
    asked = large_answer()
    limits_ms = (0.01, 1.0, 5.0, 60_000.0)
    ended = driver(target, *(Call("Embed", [asked], limit_ms) for limit_ms in limits_ms))
    assert {one.code for one in ended} == {OK, grpc.StatusCode.DEADLINE_EXCEEDED}
    for one in ended:
        assert one.answers == ([asked.answer] if one.code is OK else [])


def test_cancelled_calls_leave_the_server_to_the_others(driver: Driver, target: str) -> None:
    asked = lookups(40)
    cancelled = [Call("EmbedStream", asked, cancel=True) for _ in range(10)]
    cancelled += [Call("Embed", [large_answer()], cancel=True) for _ in range(10)]
    kept = [Call("Embed", [one]) for one in asked]
    ended = driver(target, *cancelled, *kept)
    codes = [one.code for one in ended[: len(cancelled)]]
    assert set(codes[:10]) == {grpc.StatusCode.CANCELLED}
    assert set(codes[10:]) <= {grpc.StatusCode.CANCELLED, OK}
    assert [one.answers for one in ended[len(cancelled) :]] == [[one.answer] for one in asked]


def test_grpc_gos_health_client(target: str) -> None:
    (ended,) = go_driver()(target, Call("Health"))
    assert (ended.code, ended.bodies) == (OK, [b"SERVING", b"SERVING"])


def test_the_lock_of_the_packages_names_no_host() -> None:
    """Checks that npm installs from the configured registry; npm verifies the hashes."""
    from interop.drivers import HERE

    assert tool("npm")
    assert '"resolved"' not in (HERE / "node" / "package-lock.json").read_text()
