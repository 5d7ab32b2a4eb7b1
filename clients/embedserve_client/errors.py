"""What can go wrong with a call, as one small tree, the same for REST and gRPC.

The transports hand a status code (the names of the wire contract) and a message to
`error_from` and raise what it gives. Never raised here: httpx and grpc exceptions, which
the transports translate.
"""

from typing import NoReturn


class EmbedServeClientError(Exception):
    """A call that got no vectors.

    message: a sentence for a person.
    field: the field of the request that is wrong, such as "features.movie[3]"; empty if none.
    retry_after_s: how long the server asks to wait before the next try; None if it did not say.
    """

    def __init__(
        self, message: str, *, field: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def result(self) -> NoReturn:
        """Raises this error; `EmbedResult.result` returns the vectors instead."""
        raise self


class InvalidRequest(EmbedServeClientError, ValueError):
    """The request is wrong: found here before anything was sent, or refused by the server."""


class Unauthenticated(EmbedServeClientError):
    """The server does not know who asks: no token, or one that is wrong, expired or revoked."""


class PermissionDenied(EmbedServeClientError):
    """The server knows who asks, and they may not."""


class UnknownModel(EmbedServeClientError):
    """The server serves no model of that name."""


class TooLarge(InvalidRequest):
    """The request, or its answer, is over a size limit, which the message names: ask for less."""


class Overloaded(EmbedServeClientError):
    """The server's queue is full, or the caller over its limits: the same call may be answered
    later."""


class DeadlineExceeded(EmbedServeClientError):
    """No answer within timeout_s."""


class Unavailable(EmbedServeClientError):
    """No server was reached, or it is starting, draining, or stopped before it took the call."""


class ServerError(EmbedServeClientError):
    """The server failed, or answered something that is not embedserve's protocol."""


_ERROR_OF_CODE: dict[str, type[EmbedServeClientError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "NOT_FOUND": UnknownModel,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": PermissionDenied,
    "RESOURCE_EXHAUSTED": Overloaded,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "UNAVAILABLE": Unavailable,
    # What grpcio's server gives the calls that it had not begun when it was told to stop.
    "CANCELLED": Unavailable,
    "INTERNAL": ServerError,
}


_OVER_A_LIMIT = ("larger than max", "the limit is")
"""What grpc says of a message that it does not send or take, and the server of one over a limit."""


def error_from(
    code: str, message: str, *, field: str = "", retry_after_s: float | None = None
) -> EmbedServeClientError:
    """The error that a status code stands for; a code we do not know is a ServerError.

    RESOURCE_EXHAUSTED stands for two: a full queue, after which a server says when to come again,
    and a request that is too large, of which it names the field.
    """
    kind = _ERROR_OF_CODE.get(code)
    if (
        kind is Overloaded
        and retry_after_s is None
        and (field or any(said in message for said in _OVER_A_LIMIT))
    ):
        kind = TooLarge
    if kind is None:
        return ServerError(f"{code}: {message}", field=field)
    return kind(message or code, field=field, retry_after_s=retry_after_s)
