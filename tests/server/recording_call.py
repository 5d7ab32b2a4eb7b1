"""A call of the pipeline that keeps what it is told."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import NoReturn

import pytest

from embedserve.codec.codec import JSON, PROTOBUF, Codec
from embedserve.errors import EmbedServeError
from embedserve.lookup import ResponseChunks
from embedserve.metrics.metrics import ProtocolMetrics
from embedserve.pipeline import RequestContext, RequestOptions, RequestPipeline
from embedserve.tracing.request_id import HeaderList

BODY = b'{"features": {"user": [1]}}'
SECRET = "secret of the server"


class RecordingCall(RequestContext):
    """Keeps what it is told.

    Attributes:
        told: answers and errors, in order.
        failure: what writing an answer raises, if anything.
    """

    __slots__ = ("failure", "told")

    def __init__(
        self, pipeline: RequestPipeline, options: RequestOptions, start_s: float | None = None
    ) -> None:
        super().__init__(options, perf_counter() if start_s is None else start_s, pipeline)
        self.told: list[bytes | EmbedServeError] = []
        self.failure: Exception | None = None

    def write_response(
        self, parts: ResponseChunks, nbytes: int, headers: HeaderList | None = None
    ) -> None:
        if self.failure is not None:
            raise self.failure
        body = b"".join(parts)
        assert len(body) == nbytes
        self.told.append(body)

    def write_error(self, error: EmbedServeError, headers: HeaderList) -> None:
        self.told.append(error)

    @property
    def error(self) -> EmbedServeError:
        (one,) = self.told
        assert isinstance(one, EmbedServeError)
        return one


def metrics_of(pipeline: RequestPipeline) -> ProtocolMetrics:
    return pipeline.metrics.protocols["rest"]


def outcomes(pipeline: RequestPipeline) -> dict[str, int]:
    return dict(metrics_of(pipeline).outcomes)


def asked(
    pipeline: RequestPipeline,
    codec: Codec = JSON,
    *,
    model: str = "",
    timeout_s: float | None = None,
) -> RequestOptions:
    return RequestOptions(model, codec, PROTOBUF, timeout_s, metrics_of(pipeline))


def ask(pipeline: RequestPipeline, body: bytes = BODY, *, model: str = "") -> RecordingCall:
    call = RecordingCall(pipeline, asked(pipeline, model=model))
    pipeline.submit(call, body)
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
