"""HTTP calls as data: what to send, and how to read what comes back.

Nothing here does I/O, so that the sync and the async client differ in the sending alone. Errors of
the server and of httpx become ours here.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx

from embedserve_client.core.deadline import timeout_headers
from embedserve_client.errors import (
    DeadlineExceeded,
    EmbedServeClientError,
    ServerError,
    TooLarge,
    Unavailable,
    error_from,
)

T = TypeVar("T")

# Of answers that are not ours, such as a proxy's. A 404 among them is a wrong address, not an
# unknown model.
_CODE_OF_FOREIGN_STATUS = {
    429: "RESOURCE_EXHAUSTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def error_of(response: httpx.Response) -> EmbedServeClientError:
    """What an answer reports that is none."""
    retry_after_s = _retry_after_s(response.headers.get("Retry-After", ""))
    try:
        error = json.loads(response.content)["error"]
        code, message, at = error["code"], error["message"], error.get("field") or ""
    except (ValueError, LookupError, TypeError, AttributeError):
        code = _CODE_OF_FOREIGN_STATUS.get(response.status_code, "INTERNAL")
        message, at = f"status {response.status_code}: {response.text[:200]}", ""
    if response.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
        return TooLarge(message, field=at)
    return error_from(code, message, field=at, retry_after_s=retry_after_s)


def _retry_after_s(header: str) -> float | None:
    """Seconds; the header's other form, a date, is passed over."""
    return float(header) if header.isascii() and header.isdigit() else None


@dataclass(frozen=True)
class Call(Generic[T]):
    """One HTTP request and the readers of its answer: of a good one's body, and of any other."""

    method: str
    path: str
    read: Callable[[bytes], T]
    timeout_s: float | None
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    read_error: Callable[[httpx.Response], EmbedServeClientError] = error_of

    def arguments(self) -> dict[str, Any]:
        """For httpx's request()."""
        return {
            "method": self.method,
            "url": self.path,
            "content": self.content,
            "headers": {**self.headers, **timeout_headers(self.timeout_s)},
            "timeout": self.timeout_s,
        }

    def result(self, response: httpx.Response) -> T:
        """What the answer holds; raises what it reports."""
        if response.status_code != httpx.codes.OK:
            raise self.read_error(response)
        return self.read(response.content)


@contextmanager
def httpx_errors() -> Iterator[None]:
    """The boundary at which httpx's exceptions become ours."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise DeadlineExceeded(f"no answer in time: {_said(error)}") from error
    except httpx.TransportError as error:
        raise Unavailable(f"the server was not reached: {_said(error)}") from error
    except httpx.HTTPError as error:
        raise ServerError(f"the answer could not be read: {_said(error)}") from error


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
