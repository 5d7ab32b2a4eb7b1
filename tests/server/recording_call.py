"""A call of the exchange that keeps what it is told."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import NoReturn

import pytest

from embedserve.codec.codec import JSON, PROTOBUF, Codec
from embedserve.errors import EmbedServeError
from embedserve.exchange import Asked, Call, Exchange
from embedserve.metrics.metrics import ProtocolMetrics
from embedserve.tracing.request_id import Told
from embedserve.types import Parts

BODY = b'{"features": {"user": [1]}}'
SECRET = "secret of the server"


class RecordingCall(Call):
    """Keeps what it is told.

    Attributes:
        told: answers and errors, in order.
        failure: what writing an answer raises, if anything.
    """

    __slots__ = ("failure", "told")

    def __init__(self, exchange: Exchange, asked: Asked, start_s: float | None = None) -> None:
        super().__init__(asked, perf_counter() if start_s is None else start_s, exchange)
        self.told: list[bytes | EmbedServeError] = []
        self.failure: Exception | None = None

    def write_answer(self, parts: Parts, nbytes: int, told: Told | None = None) -> None:
        if self.failure is not None:
            raise self.failure
        body = b"".join(parts)
        assert len(body) == nbytes
        self.told.append(body)

    def write_error(self, error: EmbedServeError, told: Told) -> None:
        self.told.append(error)

    @property
    def error(self) -> EmbedServeError:
        (one,) = self.told
        assert isinstance(one, EmbedServeError)
        return one


def metrics_of(exchange: Exchange) -> ProtocolMetrics:
    return exchange.metrics.protocols["rest"]


def outcomes(exchange: Exchange) -> dict[str, int]:
    return dict(metrics_of(exchange).outcomes)


def asked(
    exchange: Exchange, codec: Codec = JSON, *, model: str = "", timeout_s: float | None = None
) -> Asked:
    return Asked(model, codec, PROTOBUF, timeout_s, metrics_of(exchange))


def ask(exchange: Exchange, body: bytes = BODY, *, model: str = "") -> RecordingCall:
    call = RecordingCall(exchange, asked(exchange, model=model))
    exchange.ask(call, body)
    return call


def fail(*args: object) -> NoReturn:
    raise ZeroDivisionError(SECRET)


def expect_internal(call: RecordingCall, caplog: pytest.LogCaptureFixture) -> None:
    """It was answered in general, and the log says why in full."""
    assert call.error.code == "INTERNAL"
    assert call.error.message == "an error of the server; its log says which"
    assert caplog.text.count(f"ZeroDivisionError: {SECRET}") == 1
    assert "Traceback" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
