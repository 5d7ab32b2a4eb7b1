"""The errors of a request, one small tree; frontends map its leaves to their statuses.

What the client did wrong is said with the field and the value. What the server did wrong is
logged in full where it happens, and answered in general.
"""

from __future__ import annotations

from typing import Protocol, Self

INTERNAL = "an error of the server; its log says which"
"""What a caller is told of an error that nobody foresaw."""

DRAINING = "draining before the stop"
LOADING = "the models are being loaded"


class ServedVersion(Protocol):
    """A version of a model, by which requests are counted; ModelInfo is one."""

    @property
    def served_as(self) -> str: ...

    @property
    def version(self) -> int: ...


class EmbedServeError(Exception):
    """Any error that a request is answered with.

    Attributes:
        code: the canonical gRPC code's name, the same in REST and gRPC answers.
        http_status: the REST status.
        retry_after_s: when the same request may be tried again; 0 if that is no use.
        message: a sentence for the caller.
        field: the field of the request that is wrong, or "".
        model: the version that rejects the request; None where none was chosen.
    """

    code = "INTERNAL"
    http_status = 500
    retry_after_s = 0

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.model: ServedVersion | None = None

    def of(self, model: ServedVersion) -> Self:
        """Names the version that rejects the request."""
        self.model = model
        return self


class InvalidRequestError(EmbedServeError):
    """The request can never be answered as it is."""

    code = "INVALID_ARGUMENT"
    http_status = 400


class UnknownModelError(EmbedServeError):
    code = "NOT_FOUND"
    http_status = 404


class UnknownRegionError(EmbedServeError):
    """A region of shared memory that its caller has not registered."""

    code = "NOT_FOUND"
    http_status = 404


class RefusedError(EmbedServeError):
    """What an operator asked for cannot be as things are."""

    code = "FAILED_PRECONDITION"
    http_status = 409


class RequestTooLargeError(EmbedServeError):
    """Over a limit on what one request may hold."""

    code = "RESOURCE_EXHAUSTED"
    http_status = 413


class OverloadedError(EmbedServeError):
    """The queue is full; the same request may be answered later."""

    code = "RESOURCE_EXHAUSTED"
    http_status = 429
    retry_after_s = 1


class UnauthenticatedError(EmbedServeError):
    """Nobody knows who asks, or their token has ended."""

    code = "UNAUTHENTICATED"
    http_status = 401


class PermissionDeniedError(EmbedServeError):
    """Who asks may not ask that."""

    code = "PERMISSION_DENIED"
    http_status = 403


class RateLimitedError(EmbedServeError):
    """Who asks asks too much; others are answered."""

    code = "RESOURCE_EXHAUSTED"
    http_status = 429

    def __init__(self, message: str, field: str = "", retry_after_s: int = 1) -> None:
        super().__init__(message, field)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(EmbedServeError):
    code = "DEADLINE_EXCEEDED"
    http_status = 504


class NotReadyError(EmbedServeError):
    """Draining before the stop, or damaged."""

    code = "UNAVAILABLE"
    http_status = 503
    retry_after_s = 1


class EngineError(EmbedServeError):
    """The lookup failed; the cause is in the log."""

    code = "INTERNAL"
    http_status = 500
