"""HTTP calls as data: the request to send, and the readers of its response.

Nothing here does I/O, so that the sync and the async client differ only in the sending. Translates
errors of the server and of httpx into EmbedServeClientError.
"""

import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx

from embedserve_client.core.deadline import timeout_headers
from embedserve_client.errors import (
    CODES,
    DeadlineExceeded,
    EmbedServeClientError,
    Overloaded,
    PermissionDenied,
    ServerError,
    TooLarge,
    Unauthenticated,
    Unavailable,
    error_from,
)

T = TypeVar("T")

BODY_BYTES_SHOWN = 200
# Errors in responses of other software, such as a proxy. A 404 there is a wrong address, not an
# unknown model.
_ERROR_OF_FOREIGN_STATUS: dict[int, type[EmbedServeClientError]] = {
    401: Unauthenticated,
    403: PermissionDenied,
    413: TooLarge,
    429: Overloaded,
    502: Unavailable,
    503: Unavailable,
    504: DeadlineExceeded,
}


def error_of(response: httpx.Response) -> EmbedServeClientError:
    """Returns the error that an error response reports. Its status decides if its body has none of
    embedserve's codes."""
    retry_after_s = _retry_after_s(response.headers.get("Retry-After", ""))
    try:
        error = json.loads(response.content)["error"]
        code, message, at = error["code"], str(error["message"]), str(error.get("field") or "")
        is_foreign = code not in CODES
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        is_foreign = True
    if is_foreign:
        kind = _ERROR_OF_FOREIGN_STATUS.get(response.status_code, ServerError)
        return kind(describe_response(response), retry_after_s=retry_after_s)
    if code == "NOT_FOUND" and message.endswith(": Not Found"):  # a path, not a model
        is_listing = message.startswith("GET ")
        hint = " A management port, if there is one, has the models" if is_listing else ""
        return ServerError(f"{message}: is the path of base_url right?{hint}")
    if response.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
        return TooLarge(message, field=at)
    return error_from(code, message, field=at, retry_after_s=retry_after_s)


def describe_response(response: httpx.Response) -> str:
    """Returns the status and the beginning of the body of another software's error response. Does
    not use the charset that it names, whose codec may fail."""
    beginning = response.content[:BODY_BYTES_SHOWN].decode("utf-8", "replace")
    return f"status {response.status_code}: {beginning}"


def _retry_after_s(header: str) -> float | None:
    """Returns the seconds in a Retry-After header. Ignores the header's other format, a date."""
    return float(header) if header.isascii() and header.isdigit() else None


@dataclass(frozen=True)
class Call(Generic[T]):
    """One HTTP request, with the reader of a successful body and the reader of any other
    response."""

    method: str
    path: str
    read: Callable[[bytes], T]
    timeout_s: float | None
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    read_error: Callable[[httpx.Response], EmbedServeClientError] = error_of

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments for httpx's request()."""
        return {
            "method": self.method,
            "url": self.path,
            "content": self.content,
            "headers": {**self.headers, **timeout_headers(self.timeout_s)},
            "timeout": self.timeout_s,
        }

    def result(self, response: httpx.Response) -> T:
        """Returns the result in a response, or raises the error that it reports."""
        if response.status_code != httpx.codes.OK:
            raise self.read_error(response)
        return self.read(response.content)


@contextmanager
def httpx_errors(address: str) -> Iterator[None]:
    """Translates httpx exceptions raised in the block into EmbedServeClientError. The message of a
    failed connection names ``address``."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise DeadlineExceeded(f"no answer in time: {_message_of(error)}") from error
    except (httpx.TransportError, ssl.SSLError) as error:
        # httpx.AsyncClient raises SSLError for an alert after the handshake, such as that of a
        # server which requires another certificate.
        raise Unavailable(
            f"the server was not reached at {address}: {_message_of(error)}"
        ) from error
    except httpx.HTTPError as error:
        raise ServerError(f"the answer could not be read: {_message_of(error)}") from error


def _message_of(error: Exception) -> str:
    return str(error) or type(error).__name__
