"""Tests of retries of all four clients: which errors are retried, when, and how often."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from client.fake import FakeModel, grpc_server, rest_server
from running_servers import free_port

from embedserve_client import EmbedClient, EmbedServeClientError, GrpcEmbedClient
from embedserve_client.core.retries import FIRST_PAUSE_S, PAUSE_S_MAX, RetryState
from embedserve_client.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ServerError,
    TooLarge,
    Unavailable,
    UnknownModel,
)

OTHERS = (InvalidRequest, TooLarge, UnknownModel, DeadlineExceeded, ServerError)


@pytest.mark.parametrize("kind", [Overloaded, Unavailable])
def test_pauses_double_at_most_and_are_drawn_at_random(kind: type[EmbedServeClientError]) -> None:
    for _ in range(100):
        tries, longest_s = RetryState(8, None), FIRST_PAUSE_S
        for _ in range(8):
            pause_s = tries.pause_s(kind("no"))
            assert pause_s is not None
            assert 0 <= pause_s <= longest_s
            longest_s = min(PAUSE_S_MAX, 2 * longest_s)
    assert len({RetryState(1, None).pause_s(kind("no")) for _ in range(100)}) > 50


def test_what_the_server_asks_for_comes_first() -> None:
    pause_s = RetryState(1, None).pause_s(Overloaded("full", retry_after_s=3.0))

    assert pause_s is not None
    assert 3.0 <= pause_s <= 3.0 + FIRST_PAUSE_S


def test_a_server_that_asks_for_an_hour_is_not_asked_again() -> None:
    assert RetryState(1, None).pause_s(Overloaded("full", retry_after_s=3600.0)) is None


@pytest.mark.parametrize("kind", OTHERS)
def test_what_no_time_mends_is_not_tried_again(kind: type[EmbedServeClientError]) -> None:
    assert RetryState(9, None).pause_s(kind("no")) is None


def test_there_are_no_more_tries_than_asked_for() -> None:
    tries = RetryState(2, None)

    pauses_s = [tries.pause_s(Overloaded("full")) for _ in range(3)]

    assert [pause_s is None for pause_s in pauses_s] == [False, False, True]


def test_a_pause_past_the_deadline_is_not_made() -> None:
    assert RetryState(2, 2.0).pause_s(Overloaded("full", retry_after_s=3.0)) is None


def test_the_next_try_has_what_is_left_of_the_calls_time() -> None:
    tries = RetryState(1, 0.2)
    before_s, end_s = tries.left_s(), time.monotonic() + 0.2
    while time.monotonic() < end_s:
        time.sleep(0.01)

    assert before_s is not None
    assert 0 < before_s <= 0.2
    assert tries.left_s() == pytest.approx(0.001)
    assert RetryState(1, None).left_s() is None


@pytest.mark.parametrize("retries", [-1, 1.5, True, "2"])
@pytest.mark.parametrize("make", [EmbedClient, GrpcEmbedClient])
def test_retries_are_counted_in_whole_numbers(make: Any, retries: Any) -> None:
    with pytest.raises(ValueError, match=r"retries: .* is not a whole number"):
        make("127.0.0.1:1", retries=retries)


def test_a_call_that_was_refused_is_made_again(retrying_client: Any, model: FakeModel) -> None:
    model.refusals = ["UNAVAILABLE", "UNAVAILABLE"]

    assert retrying_client.embed({"user": [1]}).batch_size == 1
    assert len(model.requests) == 3


def test_after_the_last_try_the_error_is_told(retrying_client: Any, model: FakeModel) -> None:
    model.refusals = ["UNAVAILABLE"] * 4

    with pytest.raises(Unavailable, match="ordered by the test"):
        retrying_client.embed({"user": [1]})
    assert len(model.requests) == 3


@pytest.mark.parametrize("make", [EmbedClient, GrpcEmbedClient])
def test_a_server_that_comes_later_is_reached(make: Any, model: FakeModel) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool, make(f"127.0.0.1:{port}", retries=50) as client:
        with pytest.raises(Unavailable):
            make(f"127.0.0.1:{port}").embed({"user": [1]})
        answer = pool.submit(client.embed, {"user": [1]}, timeout_s=60)
        serve = rest_server if make is EmbedClient else grpc_server
        with serve(model, port):
            assert answer.result().batch_size == 1


def test_a_wrong_call_is_made_once(retrying_client: Any, model: FakeModel) -> None:
    with pytest.raises(UnknownModel):
        retrying_client.embed({"user": [1]}, model="books")
    assert len(model.requests) == 1


def test_by_default_nothing_is_tried_again(client: Any, model: FakeModel) -> None:
    model.refusals = ["UNAVAILABLE"]

    with pytest.raises(Unavailable):
        client.embed({"user": [1]})
    assert len(model.requests) == 1


def test_a_server_that_asks_for_more_time_than_there_is_is_not_asked_again(
    rest_url: str, model: FakeModel
) -> None:
    model.refusals, model.retry_after_s = ["RESOURCE_EXHAUSTED"], 60

    with EmbedClient(rest_url, retries=2, timeout_s=59.0) as client, pytest.raises(Overloaded):
        client.embed({"user": [1]})
    assert len(model.requests) == 1


def test_the_time_that_is_left_is_the_next_trys_deadline(rest_url: str, model: FakeModel) -> None:
    model.refusals, model.slow_s = ["UNAVAILABLE"], 0.002  # the header is in whole milliseconds

    with EmbedClient(rest_url, retries=1, timeout_s=60.0) as client:
        client.embed({"user": [1]})

    first_ms, second_ms = (int(one or "0") for one in model.timeouts_ms)
    assert first_ms > second_ms > 0
