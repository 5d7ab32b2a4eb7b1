"""Tests of the error classes alone; the clients' tests cover them on the wire."""

import pickle

import pytest

from embedserve_client.errors import InvalidRequest, Overloaded, ServerError, TooLarge, error_from


def test_unknown_code_becomes_a_server_error_that_names_the_code() -> None:
    error = error_from("DATA_LOSS", "gone", field="features.user")

    assert type(error) is ServerError
    assert (str(error), error.field) == ("DATA_LOSS: gone", "features.user")


def test_error_without_a_message_shows_its_code() -> None:
    assert str(error_from("UNAVAILABLE", "")) == "UNAVAILABLE"


def test_invalid_request_is_a_value_error() -> None:
    assert issubclass(InvalidRequest, ValueError)


@pytest.mark.parametrize(
    ("message", "field", "retry_after_s", "kind"),
    [
        ("the queue is full", "", 1.0, Overloaded),
        ("the queue is full", "", None, Overloaded),
        ("ids has over 9 numbers", "ids", None, TooLarge),
        ("Received message larger than max (5 vs. 4)", "", None, TooLarge),
        ("the message has 9 bytes, the limit is 8 (--body-bytes-max)", "", None, TooLarge),
        ("the queue holds 9 ids; 4 more would exceed its limit of 10", "", None, Overloaded),
    ],
)
def test_resource_exhausted_is_either_overloaded_or_too_large(
    message: str, field: str, retry_after_s: float | None, kind: type[Exception]
) -> None:
    error = error_from("RESOURCE_EXHAUSTED", message, field=field, retry_after_s=retry_after_s)

    assert type(error) is kind


def test_errors_survive_pickling() -> None:
    error = error_from("RESOURCE_EXHAUSTED", "queue full", field="ids", retry_after_s=2.0)

    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - of our own making

    assert type(copy) is Overloaded
    assert (str(copy), copy.field, copy.retry_after_s) == ("queue full", "ids", 2.0)


def test_result_of_an_error_raises_the_error() -> None:
    error = error_from("NOT_FOUND", "no model 'a'")

    with pytest.raises(type(error)) as caught:
        error.result()

    assert caught.value is error
