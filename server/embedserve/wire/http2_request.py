"""Base class of embed requests that have an HTTP/2 stream each, over gRPC or REST."""

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
    late_request,
)
from embedserve.tracing.request_id import HeaderList
from embedserve.wire.http2.stream import Stream

LATE_STREAMS_MAX = 16
"""Open streams of a connection up to which its rejections may be delayed."""


class Http2RequestContext(RequestContext):
    """An embed request as stream handler. Subclasses read the request and write the response."""

    __slots__ = ("_headers", "_stream")

    def __init__(
        self,
        options: RequestOptions,
        pipeline: RequestPipeline,
        headers: Mapping[bytes, bytes],
        stream: Stream,
    ) -> None:
        super().__init__(options, perf_counter(), pipeline)
        self._headers = headers
        self._stream = stream

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
        if isinstance(error, OverloadedError):
            self._stream.keep_bodies_back()
        self.end(error, headers)

    def reset(self) -> None:
        self.cancel()

    def resume(self) -> None:
        """Does nothing: the complete response is written in one call."""

    def check_time(self, now_s: float) -> None:
        if not self._stream.is_received and now_s - self.start_s > REQUEST_S_MAX:
            self.reject(late_request())

    def drain(self) -> None:
        """Does nothing: the request was accepted and is answered."""
