"""Errors of requests. Each class has a gRPC code and an HTTP status, which the protocols send.

The message of a client's error names the field and the value. A server error is logged in full
where it happens, and the client gets a general message.
"""

from __future__ import annotations

from typing import Protocol, Self

INTERNAL = "an error of the server; its log says which"
"""Message to the client for an unexpected error."""

DRAINING = "draining before the stop"
LOADING = "the models are being loaded"

MESSAGE_CHARACTERS_MAX = 4000
FIELD_CHARACTERS_MAX = 500
"""Characters of an error's message and field. They quote the request, and responses are cached."""
NAME_CHARACTERS_MAX = 200
"""Characters of a caller's name for something that a message or field quotes."""


def shortened(name: str, characters_max: int = NAME_CHARACTERS_MAX) -> str:
    """Returns the start of ``name`` as an error quotes it."""
    return name if len(name) <= characters_max else name[:characters_max] + "…"


class ServedVersion(Protocol):
    """A served version of a model, which labels the counts of requests. ModelInfo implements it."""

    @property
    def served_as(self) -> str: ...

    @property
    def version(self) -> int: ...


class EmbedServeError(Exception):
    """Base class of the errors that a request can end with.

    Attributes:
        code: name of the canonical gRPC code, the same in REST and gRPC responses.
        http_status: HTTP status of the REST response.
        retry_after_s: seconds after which the same request may be retried; 0 if a retry is no use.
        message: sentence for the caller, cut to MESSAGE_CHARACTERS_MAX.
        field: invalid field of the request, or "", cut to FIELD_CHARACTERS_MAX.
        model: version that rejected the request; None if none was selected.
        caller: name of a known caller that was not admitted; "" for any other rejection.
    """

    code = "INTERNAL"
    http_status = 500
    retry_after_s = 0
    caller = ""

    def __init__(self, message: str, field: str = "") -> None:
        self.message = shortened(message, MESSAGE_CHARACTERS_MAX)
        self.field = field[:FIELD_CHARACTERS_MAX]
        super().__init__(self.message)
        self.model: ServedVersion | None = None

    def set_model(self, model: ServedVersion) -> Self:
        """Sets the version that rejects the request, and returns the error."""
        self.model = model
        return self


class InvalidRequestError(EmbedServeError):
    """The request is invalid and would be rejected again."""

    code = "INVALID_ARGUMENT"
    http_status = 400


class UnknownModelError(EmbedServeError):
    """The server serves no such model, version or service."""

    code = "NOT_FOUND"
    http_status = 404


class UnknownRegionError(EmbedServeError):
    """The caller has not registered this shared-memory region."""

    code = "NOT_FOUND"
    http_status = 404


class ConflictError(EmbedServeError):
    """The operation conflicts with the present state of the server."""

    code = "FAILED_PRECONDITION"
    http_status = 409


class RequestTooLargeError(EmbedServeError):
    """The request exceeds a limit on the size of a single request."""

    code = "RESOURCE_EXHAUSTED"
    http_status = 413


class OverloadedError(EmbedServeError):
    """The server is overloaded, as when a queue is full; the same request may succeed later."""

    code = "RESOURCE_EXHAUSTED"
    http_status = 429
    retry_after_s = 1


class UnauthenticatedError(EmbedServeError):
    """The caller has no valid token or certificate: it is missing, unknown, expired or revoked."""

    code = "UNAUTHENTICATED"
    http_status = 401


class PermissionDeniedError(EmbedServeError):
    """The caller is authenticated, but lacks the permission."""

    code = "PERMISSION_DENIED"
    http_status = 403


class RateLimitedError(EmbedServeError):
    """The caller exceeds its own rate or its limit of concurrent requests. Other callers are
    served."""

    code = "RESOURCE_EXHAUSTED"
    http_status = 429

    def __init__(self, message: str, field: str = "", retry_after_s: int = 1) -> None:
        super().__init__(message, field)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(EmbedServeError):
    """The deadline of the request has passed, or its body is late."""

    code = "DEADLINE_EXCEEDED"
    http_status = 504


class NotReadyError(EmbedServeError):
    """The server loads its models, drains, or has damaged rows; a part is not ready; or the rows
    are older than the ``min_seq`` of the request."""

    code = "UNAVAILABLE"
    http_status = 503
    retry_after_s = 1


class MissingPartError(EmbedServeError):
    """A part of the tables has no replica: none was there, or each that was called is lost."""

    code = "UNAVAILABLE"
    http_status = 503
    retry_after_s = 1


class EngineError(EmbedServeError):
    """The server failed to process the request; the cause is in the log."""

    code = "INTERNAL"
    http_status = 500
