"""gRPC status codes, and header blocks of responses, errors and trailers."""

from __future__ import annotations

from functools import lru_cache

from embedserve.errors import EmbedServeError
from embedserve.wire.grpc.grpc_framing import ENCODINGS, GrpcCallError, percent_encoded
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http_stream import Headers

CODES = {
    "OK": 0,
    "CANCELLED": 1,
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "PERMISSION_DENIED": 7,
    "RESOURCE_EXHAUSTED": 8,
    "FAILED_PRECONDITION": 9,
    "UNIMPLEMENTED": 12,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
    "UNAUTHENTICATED": 16,
}
"""Status codes that the server uses, by name (github.com/grpc/grpc, doc/statuscodes.md)."""
MESSAGE_BYTES_MAX, FIELD_BYTES_MAX = 2000, 500
"""Bytes of the message and the field of a status before percent-encoding, which may triple them.
Clients reject trailers over 8 KiB."""
ERROR_BLOCKS_MAX = 16
"""Header blocks of errors that are cached."""

_HEAD: Headers = [(b":status", b"200"), (b"content-type", b"application/grpc")]
HEAD_BLOCK = encode(_HEAD)
OK_TRAILERS: Headers = [(b"grpc-status", b"0")]
OK_BLOCK = encode(OK_TRAILERS)


def error_trailers(error: EmbedServeError) -> Headers:
    """Returns the trailers of a call that ends with ``error``."""
    return _trailers(_status(error), error.message, error.field, error.retry_after_s)


def error_block(error: EmbedServeError) -> bytes:
    """Returns the header block of a Trailers-Only response with ``error``. The block is cached."""
    return _error_block(_status(error), error.message, error.field, error.retry_after_s)


def _status(error: EmbedServeError) -> str:
    return error.grpc_status if isinstance(error, GrpcCallError) else error.code


def _trailers(status: str, message: str, field: str, retry_after_s: int) -> Headers:
    trailers = [(b"grpc-status", b"%d" % CODES[status])]
    if message:
        message = _cut(message, MESSAGE_BYTES_MAX)
        trailers.append((b"grpc-message", percent_encoded(message)))
    if status == "UNIMPLEMENTED":
        trailers.append((b"grpc-accept-encoding", ENCODINGS))
    if field:
        field = _cut(field, FIELD_BYTES_MAX).strip(" ")
        trailers.append((b"embedserve-field", percent_encoded(field)))
    if retry_after_s:
        trailers.append((b"retry-after", b"%d" % retry_after_s))
    return trailers


@lru_cache(ERROR_BLOCKS_MAX)
def _error_block(status: str, message: str, field: str, retry_after_s: int) -> bytes:
    """Encodes an error response. Cached, because an overload rejects many calls with one error."""
    return only_trailers(_trailers(status, message, field, retry_after_s))


def only_trailers(trailers: Headers) -> bytes:
    """Returns the header block of a Trailers-Only response."""
    return encode([*_HEAD, *trailers])


def _cut(text: str, bytes_max: int) -> str:
    return text.encode()[:bytes_max].decode(errors="ignore")
