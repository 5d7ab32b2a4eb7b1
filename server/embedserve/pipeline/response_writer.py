"""The connection's side of a request: its headers, its peer, and its response on the wire."""

from __future__ import annotations

from abc import ABC, abstractmethod

from embedserve.access.authenticator import ClientCertificate
from embedserve.errors import DeadlineExceededError, EmbedServeError
from embedserve.lookup_types import ResponseChunks
from embedserve.tracing.request_id import REQUEST_ID, ExtraHeaders, request_id_of

UPLOAD_S_MAX = 30.0
"""Seconds that the body of one request may take to arrive. Slower requests are rejected with
DEADLINE_EXCEEDED."""


class ResponseWriter(ABC):
    """Writes the response of one request in its protocol, and knows the connection of the request.

    Attributes:
        certificate: client certificate from the TLS handshake; None if there was none.
        peer: address of the connection's other end; "" if unknown.
    """

    __slots__ = ()

    @property
    def certificate(self) -> ClientCertificate | None:
        return None

    @property
    def peer(self) -> str:
        return ""

    @property
    def source(self) -> object:
        """Source of the request, such as its connection, that stands for an unauthenticated client
        in fair sharing. By default each request is its own source."""
        return self

    @property
    def can_delay_rejection(self) -> bool:
        """Whether a rejection may be delayed without a cost to other callers on the connection.

        It costs them over HTTP/2, where many delayed streams reach the limit on streams. Over
        HTTP/1 it may not be delayed while the client sends the body."""
        return True

    def header(self, name: bytes) -> bytes | None:
        """Returns a header that differs from request to request, such as the request id or the
        trace context; None if absent. ``name`` is in lower case.

        Headers that equal requests share may be missing: the fast path of HTTP/1 reads only the
        gaps of a template, so header(b"content-type") is None there. Their values are in
        RequestOptions.
        """
        return None

    def request_id(self) -> bytes:
        """Returns the request id sent by the caller, or else a new id."""
        return request_id_of(self.header(REQUEST_ID))

    @abstractmethod
    def write_response(
        self, chunks: ResponseChunks, nbytes: int, headers: ExtraHeaders | None = None
    ) -> None:
        """Writes the encoded response of ``nbytes`` bytes.

        Args:
            headers: extra headers of the codec and of telemetry, which gRPC sends as trailers.
        """

    @abstractmethod
    def write_error(self, error: EmbedServeError, headers: ExtraHeaders) -> None:
        """Writes ``error`` in the protocol's format, with the telemetry ``headers``."""

    def abort(self) -> None:  # noqa: B027  # a writer without a connection has nothing to end
        """Ends the connection or stream of a request whose error could not be written."""

    def on_enqueued(self) -> None:  # noqa: B027  # most writers do nothing then
        """Called when a request that was decoded off the event loop has been enqueued. A request
        decoded inline is already enqueued when `submit` returns."""


def late_request() -> DeadlineExceededError:
    """Returns the error for a request whose body did not arrive within UPLOAD_S_MAX."""
    return DeadlineExceededError(f"the request was incomplete after {UPLOAD_S_MAX:g} s")
