"""Tests of @grpc/grpc-js and grpc-go: each makes the same calls over one connection."""

import grpc
import pytest
from interop.drivers import Call, Driver, go_driver, node_driver
from interop.lookups import INVALID, INVALID_FIELD, large_request, large_response, lookup, lookups
from interop.tools import tool

OK = grpc.StatusCode.OK
DRIVERS = {"grpc-js": node_driver, "grpc-go": go_driver}


@pytest.fixture(scope="module", params=list(DRIVERS))
def driver(request: pytest.FixtureRequest) -> Driver:
    return DRIVERS[request.param]()


def test_concurrent_unary_calls_are_answered(driver: Driver, target: str) -> None:
    requested = lookups(300)
    ended = driver(target, *(Call("Embed", [one]) for one in requested))
    assert [(one.code, one.responses) for one in ended] == [
        (OK, [one.response]) for one in requested
    ]


def test_pipelined_and_turn_by_turn_streams_are_answered(driver: Driver, target: str) -> None:
    requested = lookups(300)
    calls = [Call("EmbedStream", requested), Call("EmbedStream", requested[:50], in_turns=True)]
    pipelined, turn_by_turn = driver(target, *calls)
    assert (pipelined.code, turn_by_turn.code) == (OK, OK)
    assert pipelined.responses == [one.response for one in requested]
    assert turn_by_turn.responses == [one.response for one in requested[:50]]


@pytest.mark.parametrize("gzip", [False, True], ids=["plain", "gzip"])
def test_large_and_small_messages_are_answered(driver: Driver, target: str, gzip: bool) -> None:
    requested = [large_response(), lookup(1), large_request(), lookup(2)]
    calls = [Call("EmbedStream", requested), *(Call("Embed", [one]) for one in requested)]
    stream, *unary = driver(target, *calls, gzip=gzip)
    assert stream.code is OK
    assert stream.responses == [one.response for one in requested]
    assert [(one.code, one.responses) for one in unary] == [
        (OK, [one.response]) for one in requested
    ]


def test_errors_have_status_message_and_field(driver: Driver, target: str) -> None:
    requested = [lookup(1), INVALID, lookup(2)]
    unary, stream = driver(target, Call("Embed", [INVALID]), Call("EmbedStream", requested))
    assert unary.code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{INVALID_FIELD} is 500" in unary.message
    assert unary.trailers["embedserve-field"] == INVALID_FIELD
    assert unary.responses == []
    first, wrong, last = stream.responses
    assert (stream.code, first, last) == (OK, requested[0].response, requested[2].response)
    assert (wrong.error.code, wrong.error.field) == ("INVALID_ARGUMENT", INVALID_FIELD)


def test_calls_with_distinct_metadata_are_answered(driver: Driver, target: str) -> None:
    requested = lookups(100)
    calls = [
        Call("Embed", [one], metadata={f"x-key-{number}": "v" * 300, "x-trace": f"{number:032x}"})
        for number, one in enumerate(requested)
    ]
    assert [one.responses for one in driver(target, *calls)] == [
        [one.response] for one in requested
    ]


def test_short_deadline_is_met_or_reported_as_exceeded(driver: Driver, target: str) -> None:
    requested = large_response()
    limits_ms = (0.01, 1.0, 5.0, 60_000.0)
    ended = driver(target, *(Call("Embed", [requested], limit_ms) for limit_ms in limits_ms))
    assert {one.code for one in ended} == {OK, grpc.StatusCode.DEADLINE_EXCEEDED}
    for one in ended:
        assert one.responses == ([requested.response] if one.code is OK else [])


def test_cancelled_calls_do_not_affect_other_calls(driver: Driver, target: str) -> None:
    requested = lookups(40)
    cancelled = [Call("EmbedStream", requested, cancel=True) for _ in range(10)]
    cancelled += [Call("Embed", [large_response()], cancel=True) for _ in range(10)]
    kept = [Call("Embed", [one]) for one in requested]
    ended = driver(target, *cancelled, *kept)
    codes = [one.code for one in ended[: len(cancelled)]]
    assert set(codes[:10]) == {grpc.StatusCode.CANCELLED}
    assert set(codes[10:]) <= {grpc.StatusCode.CANCELLED, OK}
    assert [one.responses for one in ended[len(cancelled) :]] == [
        [one.response] for one in requested
    ]


def test_grpc_go_health_client_gets_serving(target: str) -> None:
    (ended,) = go_driver()(target, Call("Health"))
    assert (ended.code, ended.bodies) == (OK, [b"SERVING", b"SERVING"])


def test_package_lock_names_no_registry_host() -> None:
    """Checks that npm installs from the configured registry; npm verifies the hashes."""
    from interop.drivers import HERE

    assert tool("npm")
    assert '"resolved"' not in (HERE / "node" / "package-lock.json").read_text()
