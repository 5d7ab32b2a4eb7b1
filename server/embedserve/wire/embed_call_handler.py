"""Response writers of streams, and the stream handler of an embed request, for REST and gRPC."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

from embedserve.access.authenticator import Authenticator, ClientCertificate
from embedserve.errors import EmbedServeError, OverloadedError
from embedserve.pipeline import UPLOAD_S_MAX, RequestContext, ResponseWriter, late_request
from embedserve.tracing.request_id import ExtraHeaders
from embedserve.wire.http_stream import Handler, HttpStream

AnyStream = TypeVar("AnyStream", bound=HttpStream)


class StreamWriter(ResponseWriter, Generic[AnyStream]):
    """Response writer that knows the stream of its request and the headers of that stream."""

    __slots__ = ("_headers", "_stream")

    _headers: Mapping[bytes, bytes]
    _stream: AnyStream

    @property
    def source(self) -> object:
        return self._stream.connection

    @property
    def certificate(self) -> ClientCertificate | None:
        return self._stream.connection.certificate

    @property
    def peer(self) -> str:
        return self._stream.connection.peer

    def header(self, name: bytes) -> bytes | None:
        return self._headers.get(name)

    def abort(self) -> None:
        self._stream.abort()


class EmbedCallHandler(StreamWriter[AnyStream], Handler):
    """Stream handler of one embed request, and its response writer. Subclasses read the body and
    encode the response for their protocol.

    The constructors of the subclasses set all attributes: a call for each request would cost a
    percent of its time. A subclass drops ``_context`` when it writes the response. The request
    refers to its writer, and such a cycle would live until the next garbage collection.
    """

    __slots__ = ("_context", "_is_rejected")

    _context: RequestContext | None
    _is_rejected: bool
    """Whether the caller is not admitted. The body is then discarded, because the rejection may be
    written after a delay."""

    def admit(self, context: RequestContext, authenticator: Authenticator) -> bool:
        """Returns whether the caller may make the request; rejects the request if not."""
        is_admitted = authenticator.admit(context, self._headers.get(b"authorization"))
        self._is_rejected = not is_admitted
        return is_admitted

    @property
    def can_delay_rejection(self) -> bool:
        return self._stream.can_delay_rejection

    @abstractmethod
    def end_with_error(self, error: EmbedServeError, headers: ExtraHeaders) -> None:
        """Ends the stream with ``error`` and the extra ``headers``, such as the request id."""

    def write_error(self, error: EmbedServeError, headers: ExtraHeaders) -> None:
        self._context = None
        if isinstance(error, OverloadedError):
            self._stream.slow_next_uploads()
        self.end_with_error(error, headers)

    def reset(self) -> None:
        if self._context is not None:
            self._context.cancel()
            self._context = None

    def check_time(self, now_s: float) -> None:
        context = self._context
        if context and not self._stream.is_received and now_s - context.start_s > UPLOAD_S_MAX:
            context.reject(late_request())
