"""Errors of the clients: one small class hierarchy, the same for REST and gRPC.

The transports pass a status code (a name of the wire contract) and a message to `error_from`, and
raise the error that it returns. They translate the exceptions of httpx and grpc, so that callers
never see those.
"""

from typing import NoReturn


class EmbedServeClientError(Exception):
    """Base class of all errors: the call returned no vectors.

    Attributes:
        message: description of the error, for people.
        field: field of the request that is wrong, such as "features.movie[3]"; empty if none.
        retry_after_s: seconds that the server asks the client to wait before it retries; None if
            the server did not say.
    """

    def __init__(
        self, message: str, *, field: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def result(self) -> NoReturn:
        """Raises this error. The counterpart `EmbedResult.result` returns the vectors."""
        raise self


class InvalidRequest(EmbedServeClientError, ValueError):
    """The request is invalid. The client found it before sending, or the server rejected it."""


class Unauthenticated(EmbedServeClientError):
    """The server cannot identify the caller: the token is missing, wrong, expired or revoked."""


class PermissionDenied(EmbedServeClientError):
    """The server identified the caller, but the caller lacks the permission."""


class UnknownModel(EmbedServeClientError):
    """The server serves no model of that name."""


class TooLarge(InvalidRequest):
    """The request or its response exceeds a size limit, which the message names. Smaller batches
    fit."""


class Overloaded(EmbedServeClientError):
    """The server's queue is full, or the caller exceeds its rate limits. A retry may succeed."""


class DeadlineExceeded(EmbedServeClientError):
    """No response arrived within timeout_s."""


class Unavailable(EmbedServeClientError):
    """No server was reached, or the server is starting, draining, or stopped before it took the
    call."""


class ServerError(EmbedServeClientError):
    """The server failed, or its response does not follow embedserve's protocol."""


_ERROR_OF_CODE: dict[str, type[EmbedServeClientError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "NOT_FOUND": UnknownModel,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": PermissionDenied,
    "RESOURCE_EXHAUSTED": Overloaded,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "UNAVAILABLE": Unavailable,
    # grpcio's server ends calls with this code if it is stopped before it begins them.
    "CANCELLED": Unavailable,
    "INTERNAL": ServerError,
}
CODES = _ERROR_OF_CODE.keys()

_OVER_A_LIMIT = ("larger than max", "the limit is")
"""Substrings that identify messages over a size limit. The first is from grpc, for messages that it
does not send or receive; the second is from an embedserve server."""


def error_from(
    code: str, message: str, *, field: str = "", retry_after_s: float | None = None
) -> EmbedServeClientError:
    """Returns the error for a status code; an unknown code becomes a ServerError.

    RESOURCE_EXHAUSTED has two meanings. For a full queue the server sends retry_after_s; for a
    request that is too large it sends the field, or the message names a limit.
    """
    kind = _ERROR_OF_CODE.get(code)
    if (
        kind is Overloaded
        and retry_after_s is None
        and (field or any(one in message for one in _OVER_A_LIMIT))
    ):
        kind = TooLarge
    if kind is None:
        return ServerError(f"{code}: {message}", field=field)
    return kind(message or code, field=field, retry_after_s=retry_after_s)
