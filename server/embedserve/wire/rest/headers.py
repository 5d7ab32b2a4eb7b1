"""Routes, headers and error responses of REST embed requests, without bodies and I/O.

The routes are POST /embed, POST /models/{model}/embed and, of the Open Inference Protocol,
POST /v2/models/{model}/infer, over HTTP/1 and HTTP/2. The management application (api/) handles
every other request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import lru_cache

from embedserve.codec import json_codec
from embedserve.codec.codec import BINARY_TYPE, JSON, Codec, Codecs
from embedserve.codec.open_inference import body_responses
from embedserve.errors import EmbedServeError, InvalidRequestError
from embedserve.lookup_types import ResponseChunks
from embedserve.metrics.request_metrics import ProtocolMetrics
from embedserve.pipeline import ROUTING_KEY, RequestOptions
from embedserve.tracing.request_id import REQUEST_ID, ExtraHeaders
from embedserve.wire.http_stream import LENGTH_DIGITS_MAX, Headers

EncodeError = Callable[[EmbedServeError], bytes]
ERRORS_MAX = 16
"""Error responses that are cached."""
JSON_LENGTH = b"inference-header-content-length"
"""Header with the bytes of JSON in an Open Inference Protocol body; binary tensors follow it."""
WEIGHT = re.compile(rb";\s*q=([01](?:\.\d*)?)\s*(?:;|$)")
"""Weight of a media range (in lower case) of an Accept header; 0: the range is not acceptable."""
ONCE_HEADERS = frozenset({ROUTING_KEY, b"x-timeout-ms", JSON_LENGTH})
"""Headers that may occur once: with two, a proxy and the server could each read another value."""


@dataclass(frozen=True, slots=True)
class EmbedRoute:
    """Target of an embed request.

    Attributes:
        model: model name, or MODEL@VERSION; "" for the default model.
        is_infer: whether it is a route of the Open Inference Protocol.
    """

    model: str
    is_infer: bool = False


class MethodNotAllowedError(EmbedServeError):
    code = "INVALID_ARGUMENT"
    http_status = 405


class UnsupportedEncodingError(EmbedServeError):
    code = "INVALID_ARGUMENT"
    http_status = 415


class HeadersTooLargeError(EmbedServeError):
    code = "RESOURCE_EXHAUSTED"
    http_status = 431


class TransferCodingError(EmbedServeError):
    code = "INVALID_ARGUMENT"
    http_status = 501


class HttpVersionError(EmbedServeError):
    code = "INVALID_ARGUMENT"
    http_status = 505


def embed_route(path: str) -> EmbedRoute | None:
    """Returns the embed route of ``path``, /infer included; None if it is no embed route."""
    if path == "/embed":
        return EmbedRoute("")
    if path.endswith("/embed") and path.startswith("/models/"):
        model = path[len("/models/") : -len("/embed")]
        if model and "/" not in model:
            return EmbedRoute(model)
    if path.endswith("/infer") and path.startswith("/v2/models/"):
        match path.split("/")[3:-1]:
            case [model] if model:
                return EmbedRoute(model, is_infer=True)
            case [model, "versions", version] if model and version:
                return EmbedRoute(f"{model}@{version}", is_infer=True)
    return None


def error_encoder(target: bytes) -> Callable[[EmbedServeError], bytes]:
    """Returns the encoder of errors for requests to ``target``."""
    path = target.partition(b"?")[0].decode("latin-1")
    is_infer = body_responses.is_infer_path(path)
    return body_responses.encode_error if is_infer else json_codec.encode_error


def check_method(method: str) -> None:
    """Raises MethodNotAllowedError unless ``method`` is POST."""
    if method != "POST":
        raise MethodNotAllowedError(f"method is {method}: send a POST")


def codec_of(codecs: Codecs, content_type: bytes) -> Codec:
    """Returns the codec of a body of ``content_type`` to an embed route other than /v2: JSON unless
    it names another format."""
    kind = content_type.lower()
    return next((one for one in codecs.formats if kind.startswith(one.content_type)), codecs.json)


def infer_codec(codecs: Codecs, json_length: bytes) -> Codec:
    """Returns the codec of a body with ``json_length`` bytes of JSON before binary tensors.

    Raises:
        InvalidRequestError: ``json_length`` is no length.
    """
    if not json_length.isdigit() or len(json_length) > LENGTH_DIGITS_MAX:
        raise InvalidRequestError(
            f"Inference-Header-Content-Length is {json_length.decode('latin-1')[:64]!r}, expected "
            "the bytes of the body's JSON",
            "Inference-Header-Content-Length",
        )
    return codecs.infer_binary(int(json_length))


def read_headers(
    route: EmbedRoute, headers: Headers, metrics: ProtocolMetrics, codecs: Codecs
) -> RequestOptions:
    """Parses the request options from ``headers`` (names in lower case) for ``route``.

    The body is JSON unless the content type is protobuf or Arrow. The response has the format
    of Accept, or else of the request. X-Timeout-Ms is how long the caller waits for the response.

    Raises:
        InvalidRequestError: X-Timeout-Ms is not a positive number, Inference-Header-Content-Length
            is no length, or one of ONCE_HEADERS occurs twice.
        UnsupportedEncodingError: the body is compressed.
    """
    content_type = accept = json_length = b""
    timeout_s = None
    check_once(headers, ONCE_HEADERS)
    has_id = False
    for name, value in headers:
        if name == b"content-type":
            content_type = value
        elif name == b"accept":
            accept += b"," + value.lower()
        elif name == b"x-timeout-ms":
            timeout_s = parse_timeout_ms(value)
        elif name == JSON_LENGTH:
            json_length = value
        elif name == REQUEST_ID:
            has_id = True
        elif name == b"content-encoding" and value.lower() != b"identity":
            raise UnsupportedEncodingError(
                f"Content-Encoding is {value.decode('latin-1')!r}: send the body as it is",
                "Content-Encoding",
            )
    if route.is_infer:
        codec = infer_codec(codecs, json_length) if json_length else codecs.infer
        return RequestOptions(route.model, codec, codecs.infer, timeout_s, metrics, has_id)
    codec = codec_of(codecs, content_type)
    response_codec = _accepted(accept, codecs) or codec
    return RequestOptions(route.model, codec, response_codec, timeout_s, metrics, has_id)


def _accepted(accept: bytes, codecs: Codecs) -> Codec | None:
    """Returns the format that ``accept`` names with the greatest weight, in a tie the first of
    `Codecs.formats`; None if it names none."""
    best, best_weight = None, 0.0
    ranges = accept.split(b",")  # one pattern for the whole list would take quadratic time
    for codec in codecs.formats:
        for one in ranges:
            if codec.content_type in one:
                found = WEIGHT.search(one)
                weight = float(found[1]) if found else 1.0
                if weight > best_weight:
                    best, best_weight = codec, weight
    return best


def check_once(headers: Headers, once: Container[bytes]) -> None:
    """Raises InvalidRequestError if a header of ``once`` occurs twice in ``headers``."""
    found: set[bytes] = set()
    for name, _ in headers:
        if name in found and name in once:
            shown = name.decode("ascii").title()
            raise InvalidRequestError(f"there are several {shown} headers, expected one", shown)
        found.add(name)


def parse_timeout_ms(value: bytes) -> float:
    """Parses an X-Timeout-Ms header. Returns seconds.

    Raises:
        InvalidRequestError: the value is not a positive number.
    """
    try:
        timeout_ms = float(value)
    except ValueError:
        timeout_ms = -1.0
    if not 0 < timeout_ms < float("inf"):
        raise InvalidRequestError(
            f"X-Timeout-Ms is {value.decode('latin-1')!r}, expected milliseconds above 0",
            "X-Timeout-Ms",
        )
    return timeout_ms / 1000


def headers_too_large(count: int, unit: str, limit: int) -> HeadersTooLargeError:
    """Returns the error of headers with ``count`` units ("bytes" or "lines") over ``limit``."""
    return HeadersTooLargeError(f"the headers have {count} {unit}, the limit is {limit}")


def content_headers(codec: Codec, chunks: ResponseChunks) -> Headers:
    """Returns the headers of a response encoded by ``codec``, without content-length."""
    json_bytes = 0 if codec.json_bytes is None else codec.json_bytes(chunks)
    if not json_bytes:
        return [(b"content-type", codec.content_type)]
    return [(b"content-type", BINARY_TYPE), (JSON_LENGTH, b"%d" % json_bytes)]


def encode_error_response(
    error: EmbedServeError,
    extra_headers: ExtraHeaders,
    encode: EncodeError = json_codec.encode_error,
) -> tuple[Headers, bytes]:
    """Returns (headers without content-length, body) of the response to ``error``.

    ``encode`` writes the JSON format of the route. The extra headers, such as the request id,
    come last.
    """
    kind = type(error)
    headers, body = _cached_error_response(
        kind,  # type: ignore[arg-type]  # a class has a hash
        error.message,
        error.field,
        error.retry_after_s,
        encode,
    )
    return [*headers, *extra_headers], body


@lru_cache(ERRORS_MAX)
def _cached_error_response(
    kind: type[EmbedServeError], message: str, field: str, retry_after_s: int, encode: EncodeError
) -> tuple[Headers, bytes]:
    """Encodes an error response. Cached, because overload and rate limits repeat the same error."""
    headers = [(b"content-type", JSON.content_type)]
    if kind.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if kind.http_status == 405:
        headers.append((b"allow", b"POST"))
    if retry_after_s:
        headers.append((b"retry-after", b"%d" % retry_after_s))
    return headers, encode(kind(message, field))
