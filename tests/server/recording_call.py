"""A request of the pipeline that keeps its responses and errors."""

import logging
from time import perf_counter
from typing import NoReturn

import pytest
from server.codecs import JSON, PROTOBUF
from server.pipelines import outcomes_of

from embedserve.codec.codec import Codec
from embedserve.errors import EmbedServeError
from embedserve.lookup_types import ResponseChunks
from embedserve.metrics.request_metrics import ProtocolMetrics
from embedserve.pipeline import RequestContext, RequestOptions, RequestPipeline, ResponseWriter
from embedserve.tracing.request_id import ExtraHeaders

BODY = b'{"features": {"user": [1]}}'
SECRET = "secret of the server"


class RecordingWriter(ResponseWriter):
    """Keeps the responses of one request.

    Attributes:
        responses: responses and errors, in order.
        failure: exception that the next response raises; None for none.
        error_failure: exception that the next error raises; None for none.
        is_aborted: whether the connection has been ended without a response.
    """

    def __init__(self) -> None:
        self.responses: list[bytes | EmbedServeError] = []
        self.failure: Exception | None = None
        self.error_failure: Exception | None = None
        self.is_aborted = False

    def write_response(
        self, parts: ResponseChunks, nbytes: int, headers: ExtraHeaders | None = None
    ) -> None:
        if self.failure is not None:
            raise self.failure
        body = b"".join(parts)
        assert len(body) == nbytes
        self.responses.append(body)

    def write_error(self, error: EmbedServeError, headers: ExtraHeaders) -> None:
        if self.error_failure is not None:
            raise self.error_failure
        self.responses.append(error)

    def abort(self) -> None:
        self.is_aborted = True


class SourceWriter(RecordingWriter):
    """A writer of a request from ``source``."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    @property
    def source(self) -> object:
        return self._source


class RecordingCall(RequestContext):
    """A request whose responses are kept."""

    __slots__ = ()
    writer: RecordingWriter

    def __init__(
        self,
        pipeline: RequestPipeline,
        options: RequestOptions,
        writer: RecordingWriter | None = None,
        age_s: float = 0.0,
    ) -> None:
        super().__init__(options, perf_counter() - age_s, pipeline, writer or RecordingWriter())

    @property
    def responses(self) -> list[bytes | EmbedServeError]:
        return self.writer.responses

    @property
    def error(self) -> EmbedServeError:
        (one,) = self.responses
        assert isinstance(one, EmbedServeError)
        return one


def metrics_of(pipeline: RequestPipeline) -> ProtocolMetrics:
    return pipeline.metrics.protocols["rest"]


def outcomes(pipeline: RequestPipeline) -> dict[str, int]:
    return dict(outcomes_of(metrics_of(pipeline)))


def make_options(
    pipeline: RequestPipeline,
    codec: Codec = JSON,
    *,
    model: str = "",
    timeout_s: float | None = None,
) -> RequestOptions:
    return RequestOptions(model, codec, PROTOBUF, timeout_s, metrics_of(pipeline))


def submit_request(
    pipeline: RequestPipeline,
    body: bytes = BODY,
    codec: Codec = JSON,
    *,
    model: str = "",
    timeout_s: float | None = None,
    age_s: float = 0.0,
    writer: RecordingWriter | None = None,
) -> RecordingCall:
    """Submits a request that started ``age_s`` ago."""
    options = make_options(pipeline, codec, model=model, timeout_s=timeout_s)
    call = RecordingCall(pipeline, options, writer, age_s)
    pipeline.submit(call, body)
    return call


def fail(*args: object, **kwargs: object) -> NoReturn:
    raise ZeroDivisionError(SECRET)


def expect_internal(call: RecordingCall, caplog: pytest.LogCaptureFixture) -> None:
    """Checks that ``call`` got a general error, and that the log has the cause in full."""
    assert call.error.code == "INTERNAL"
    assert call.error.message == "an error of the server; its log says which"
    assert caplog.text.count(f"ZeroDivisionError: {SECRET}") == 1
    assert "Traceback" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
