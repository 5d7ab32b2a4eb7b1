"""Tests of retries of all four clients: which errors are retried, when, and how often."""

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

NOT_RETRIED = (InvalidRequest, TooLarge, UnknownModel, DeadlineExceeded, ServerError)


@pytest.mark.parametrize("kind", [Overloaded, Unavailable])
def test_pauses_are_random_and_their_maximum_doubles(kind: type[EmbedServeClientError]) -> None:
    for _ in range(100):
        tries, longest_s = RetryState(8, None), FIRST_PAUSE_S
        for _ in range(8):
            pause_s = tries.pause_s(kind("no"))
            assert pause_s is not None
            assert 0 <= pause_s <= longest_s
            longest_s = min(PAUSE_S_MAX, 2 * longest_s)
    assert len({RetryState(1, None).pause_s(kind("no")) for _ in range(100)}) > 50


def test_pause_is_at_least_the_retry_after_of_the_server() -> None:
    pause_s = RetryState(1, None).pause_s(Overloaded("full", retry_after_s=3.0))

    assert pause_s is not None
    assert 3.0 <= pause_s <= 3.0 + FIRST_PAUSE_S


def test_retry_after_of_an_hour_is_not_retried() -> None:
    assert RetryState(1, None).pause_s(Overloaded("full", retry_after_s=3600.0)) is None


@pytest.mark.parametrize("kind", NOT_RETRIED)
def test_permanent_errors_are_not_retried(kind: type[EmbedServeClientError]) -> None:
    assert RetryState(9, None).pause_s(kind("no")) is None


def test_retries_end_at_their_limit() -> None:
    tries = RetryState(2, None)

    pauses_s = [tries.pause_s(Overloaded("full")) for _ in range(3)]

    assert [pause_s is None for pause_s in pauses_s] == [False, False, True]


def test_no_retry_if_the_pause_would_exceed_the_deadline() -> None:
    assert RetryState(2, 2.0).pause_s(Overloaded("full", retry_after_s=3.0)) is None


def test_retry_gets_the_remaining_time_of_the_call() -> None:
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
def test_invalid_number_of_retries_is_rejected(make: Any, retries: Any) -> None:
    with pytest.raises(ValueError, match=r"retries: .* is not a whole number"):
        make("127.0.0.1:1", retries=retries)


def test_rejected_call_is_retried(retrying_client: Any, model: FakeModel) -> None:
    model.rejections = ["UNAVAILABLE", "UNAVAILABLE"]

    assert retrying_client.embed({"user": [1]}).batch_size == 1
    assert len(model.requests) == 3


def test_error_is_raised_after_the_last_retry(retrying_client: Any, model: FakeModel) -> None:
    model.rejections = ["UNAVAILABLE"] * 4

    with pytest.raises(Unavailable, match="ordered by the test"):
        retrying_client.embed({"user": [1]})
    assert len(model.requests) == 3


@pytest.mark.parametrize("make", [EmbedClient, GrpcEmbedClient])
def test_server_that_starts_during_the_retries_is_reached(make: Any, model: FakeModel) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool, make(f"127.0.0.1:{port}", retries=50) as client:
        with pytest.raises(Unavailable):
            make(f"127.0.0.1:{port}").embed({"user": [1]})
        answer = pool.submit(client.embed, {"user": [1]}, timeout_s=60)
        serve = rest_server if make is EmbedClient else grpc_server
        with serve(model, port):
            assert answer.result().batch_size == 1


def test_invalid_call_is_not_retried(retrying_client: Any, model: FakeModel) -> None:
    with pytest.raises(UnknownModel):
        retrying_client.embed({"user": [1]}, model="books")
    assert len(model.requests) == 1


def test_no_retries_by_default(client: Any, model: FakeModel) -> None:
    model.rejections = ["UNAVAILABLE"]

    with pytest.raises(Unavailable):
        client.embed({"user": [1]})
    assert len(model.requests) == 1


def test_retry_after_beyond_the_deadline_is_not_retried(rest_url: str, model: FakeModel) -> None:
    model.rejections, model.retry_after_s = ["RESOURCE_EXHAUSTED"], 60

    with EmbedClient(rest_url, retries=2, timeout_s=59.0) as client, pytest.raises(Overloaded):
        client.embed({"user": [1]})
    assert len(model.requests) == 1


def test_timeout_header_of_a_retry_is_the_remaining_time(rest_url: str, model: FakeModel) -> None:
    model.rejections, model.slow_s = ["UNAVAILABLE"], 0.002  # the header is in whole milliseconds

    with EmbedClient(rest_url, retries=1, timeout_s=60.0) as client:
        client.embed({"user": [1]})

    first_ms, second_ms = (int(one or "0") for one in model.timeouts_ms)
    assert first_ms > second_ms > 0
