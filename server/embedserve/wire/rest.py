"""REST as its requests and answers are written: routes, headers, statuses. Without I/O.

POST /embed and POST /models/{model}/embed, over HTTP/1 and HTTP/2; every other request is the
management application's (api/).
"""

from __future__ import annotations

from embedserve.codec.codec import JSON, PROTOBUF, Codec
from embedserve.codec.json_codec import encode_error
from embedserve.errors import EmbedServeError, InvalidRequestError
from embedserve.exchange import ROUTING_KEY, Asked
from embedserve.metrics.metrics import ProtocolMetrics

Headers = list[tuple[bytes, bytes]]


class MethodNotAllowedError(EmbedServeError):
    code = "INVALID_ARGUMENT"
    http_status = 405


class UnsupportedEncodingError(EmbedServeError):
    code = "INVALID_ARGUMENT"
    http_status = 415


class HeadersTooLargeError(EmbedServeError):
    code = "RESOURCE_EXHAUSTED"
    http_status = 431


class VersionError(EmbedServeError):
    code = "INVALID_ARGUMENT"
    http_status = 505


def embed_route(path: str) -> str | None:
    """The model of an embed route's ``path``, "" for the default one; None for other routes."""
    if path == "/embed":
        return ""
    if path.endswith("/embed") and path.startswith("/models/"):
        model = path[len("/models/") : -len("/embed")]
        if model and "/" not in model:
            return model
    return None


def check_method(method: str) -> None:
    """Raises MethodNotAllowedError for what an embed route is not asked by."""
    if method != "POST":
        raise MethodNotAllowedError(f"method is {method}: send a POST")


def codec_of(content_type: bytes) -> Codec:
    """JSON unless it is protobuf."""
    return PROTOBUF if content_type.lower().startswith(PROTOBUF.content_type) else JSON


def read_headers(model: str, headers: Headers, metrics: ProtocolMetrics) -> Asked:
    """What ``headers`` (names in lower case) ask of ``model``.

    JSON unless the content type is protobuf; answered in the format of Accept, or else of the
    request. X-Timeout-Ms is how long the caller waits for the answer, X-Routing-Key who it is.

    Raises:
        InvalidRequestError: X-Timeout-Ms is not a positive number.
        UnsupportedEncodingError: the body is compressed.
    """
    content_type = accept = routing_key = b""
    wanted_s = None
    for name, value in headers:
        if name == b"content-type":
            content_type = value
        elif name == b"accept":
            accept = value.lower()
        elif name == b"x-timeout-ms":
            wanted_s = timeout_s(value)
        elif name == ROUTING_KEY:
            routing_key = value
        elif name == b"content-encoding" and value != b"identity":
            raise UnsupportedEncodingError(
                f"Content-Encoding is {value.decode('latin-1')!r}: send the body as it is",
                "Content-Encoding",
            )
    codec = codec_of(content_type)
    wants_protobuf = PROTOBUF.content_type in accept or (
        codec is PROTOBUF and JSON.content_type not in accept
    )
    answer_codec = PROTOBUF if wants_protobuf else JSON
    return Asked(model, codec, answer_codec, wanted_s, metrics, routing_key)


def timeout_s(value: bytes) -> float:
    """Seconds of an X-Timeout-Ms header.

    Raises:
        InvalidRequestError: it is not a positive number.
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


def headers_too_large(count: int, of: str, limit: int) -> HeadersTooLargeError:
    """What is said of headers that have ``count`` "bytes" or "lines"."""
    return HeadersTooLargeError(f"the headers have {count} {of}, the limit is {limit}")


def error_answer(error: EmbedServeError) -> tuple[Headers, bytes]:
    """(headers but for the length, body) of ``error``, in the JSON shape of every REST error."""
    headers = [(b"content-type", JSON.content_type)]
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.http_status == 405:
        headers.append((b"allow", b"POST"))
    if error.retry_after_s:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    return headers, encode_error(error)
