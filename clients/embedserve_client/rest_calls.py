"""REST calls as data: what to send, and how to read what comes back.

Everything of the REST client that does no I/O, so that the sync and the async client differ
in the sending alone. Errors of the server and of httpx become ours here.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx

from embedserve_client.batch import Features, Weights, batch_of
from embedserve_client.deadline import check_timeout, timeout_headers, timeout_of
from embedserve_client.errors import (
    DeadlineExceeded,
    EmbedServeClientError,
    ServerError,
    TooLarge,
    Unavailable,
    error_from,
)
from embedserve_client.models import (
    ModelInfo,
    ModelList,
    model_info_from_json,
    model_list_from_json,
)
from embedserve_client.result import EmbedResult, OutputDType
from embedserve_client.routing import routing_headers
from embedserve_client.wire import AnswerReader, request_of

T = TypeVar("T")

_PROTOBUF = "application/x-protobuf"
_JSON = "application/json"

# Of answers that are not ours, such as a proxy's. A 404 among them is a wrong address, not an
# unknown model.
_CODE_OF_FOREIGN_STATUS = {
    429: "RESOURCE_EXHAUSTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


@dataclass(frozen=True)
class Call(Generic[T]):
    """One HTTP request and the reader of its answer's body."""

    method: str
    path: str
    read: Callable[[bytes], T]
    timeout_s: float | None
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

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
            raise _error_of(response)
        return self.read(response.content)


class RestCalls:
    """Makes the calls of one client."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = check_timeout(timeout_s)
        self._answers = AnswerReader()

    def embed(
        self,
        features: Features,
        weights: Weights | None,
        model: str | None,
        timeout_s: float | None,
        output_dtype: OutputDType,
        output_keys: Sequence[str],
        routing_key: str | None,
    ) -> Call[EmbedResult]:
        """POST /embed with an EmbedRequest, which names the model itself."""
        batch = batch_of(features, weights)
        return Call(
            method="POST",
            path="/embed",
            read=partial(self._answers.read_bytes, batch_size=batch.batch_size),
            timeout_s=timeout_of(timeout_s, self._timeout_s),
            content=request_of(batch, model, output_dtype, output_keys).SerializeToString(),
            headers={
                "Content-Type": _PROTOBUF,
                "Accept": _PROTOBUF,
                **routing_headers(routing_key),
            },
        )

    def models(self) -> Call[ModelList]:
        """GET /models."""
        return self._get("/models", model_list_from_json)

    def model(self, name: str) -> Call[ModelInfo]:
        """GET /models/{model}."""
        return self._get(f"/models/{quote(name, safe='')}", model_info_from_json)

    def _get(self, path: str, read: Callable[[bytes], T]) -> Call[T]:
        return Call("GET", path, read, self._timeout_s, headers={"Accept": _JSON})


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


def _error_of(response: httpx.Response) -> EmbedServeClientError:
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
