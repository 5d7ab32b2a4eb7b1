"""Response writers of embed requests that have an HTTP/2 stream each, over gRPC or REST."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from time import perf_counter

from embedserve.access.authenticator import Certificate
from embedserve.errors import EmbedServeError, OverloadedError
from embedserve.pipeline import (
    REQUEST_S_MAX,
    RequestContext,
    RequestOptions,
    RequestPipeline,
    ResponseWriter,
    late_request,
)
from embedserve.tracing.request_id import HeaderList
from embedserve.wire.http2.stream import Stream

LATE_STREAMS_MAX = 16
"""Open streams of a connection up to which its rejections may be delayed."""


class StreamWriter(ResponseWriter):
    """Handler of the stream of one embed request. Subclasses read the body and write the response.

    A subclass drops ``_call`` when it writes the response: the request refers to its writer, and
    such a cycle would live until the next garbage collection.

    Attributes:
        is_rejected: whether the caller is not admitted. The body is discarded, because the
            rejection may be written after a delay.
    """

    __slots__ = ("_call", "_headers", "_stream", "is_rejected")

    _call: RequestContext | None

    def __init__(
        self,
        options: RequestOptions,
        pipeline: RequestPipeline,
        headers: Mapping[bytes, bytes],
        stream: Stream,
    ) -> None:
        self._headers = headers
        self._stream = stream
        call = self._call = RequestContext(options, perf_counter(), pipeline, self)
        authenticator = pipeline.authenticator
        self.is_rejected = authenticator is not None and not authenticator.admit(
            call, headers.get(b"authorization")
        )

    @property
    def origin(self) -> object:
        return self._stream.connection

    @property
    def certificate(self) -> Certificate | None:
        return self._stream.connection.certificate

    @property
    def peer(self) -> str:
        return self._stream.connection.peer

    @property
    def can_delay_rejection(self) -> bool:
        """Whether a rejection may be delayed: a delayed stream counts against the stream limit,
        which other callers on the connection share."""
        return len(self._stream.connection.streams) <= LATE_STREAMS_MAX

    def header(self, name: bytes) -> bytes | None:
        return self._headers.get(name)

    @abstractmethod
    def end(self, error: EmbedServeError, headers: HeaderList) -> None:
        """Ends the stream with ``error`` and the extra ``headers``, such as the request id."""

    def write_error(self, error: EmbedServeError, headers: HeaderList) -> None:
        self._call = None
        if isinstance(error, OverloadedError):
            self._stream.keep_bodies_back()
        self.end(error, headers)

    def reset(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def resume(self) -> None:
        """Does nothing: the complete response is written in one call."""

    def check_time(self, now_s: float) -> None:
        call = self._call
        if call and not self._stream.is_received and now_s - call.start_s > REQUEST_S_MAX:
            call.reject(late_request())

    def drain(self) -> None:
        """Does nothing: the request was accepted and is answered."""
