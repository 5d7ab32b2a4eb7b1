"""Replies of gRPC calls, and the response headers and messages that they are made from.

github.com/grpc/grpc, doc/PROTOCOL-HTTP2.md and doc/http-grpc-status-mapping.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote

from embedserve.wire.grpc.grpc_framing import PREFIX, PREFIX_BYTES
from embedserve.wire.grpc.statuses import CODES
from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http_stream import Headers

OK = 0
CANCELLED = CODES["CANCELLED"]
UNKNOWN = 2
DEADLINE_EXCEEDED = CODES["DEADLINE_EXCEEDED"]
PERMISSION_DENIED = CODES["PERMISSION_DENIED"]
RESOURCE_EXHAUSTED = CODES["RESOURCE_EXHAUSTED"]
UNAUTHENTICATED = CODES["UNAUTHENTICATED"]
INTERNAL = CODES["INTERNAL"]
UNAVAILABLE = CODES["UNAVAILABLE"]
STATUS_MAX = 16
STATUS_NAMES = {code: name for name, code in CODES.items()} | {UNKNOWN: "UNKNOWN"}
NUMBER_DIGITS_MAX = 9
"""Digits of a status or of retry-after; more are malformed."""
STATUS_BY_HTTP = {
    400: INTERNAL,
    401: UNAUTHENTICATED,
    403: PERMISSION_DENIED,
    404: CODES["UNIMPLEMENTED"],
    429: UNAVAILABLE,
    502: UNAVAILABLE,
    503: UNAVAILABLE,
    504: UNAVAILABLE,
}
STATUS_BY_RESET = {
    ErrorCode.REFUSED_STREAM: UNAVAILABLE,
    ErrorCode.CANCEL: CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: RESOURCE_EXHAUSTED,
    ErrorCode.INADEQUATE_SECURITY: PERMISSION_DENIED,
}
RESET_RETRY_S = 1
"""Seconds after which a call may be retried whose stream an overloaded shard has reset."""


class Reply(NamedTuple):
    """Outcome of a call.

    Attributes:
        status: gRPC status code.
        message: status message.
        payload: response message; empty unless the status is OK.
        retry_after_s: seconds after which the call may be retried; 0 if unknown. Overloaded shards
            always send it.
        is_lost: whether the shard did not process the call, or its connection was lost.
    """

    status: int
    message: str = ""
    payload: bytes = b""
    retry_after_s: int = 0
    is_lost: bool = False

    @property
    def is_too_large(self) -> bool:
        """Whether the shard rejected the size of the request. It would reject it again."""
        return self.status == RESOURCE_EXHAUSTED and not self.retry_after_s


def lost(reason: str) -> Reply:
    """Returns the reply to a call that no shard has answered."""
    return Reply(UNAVAILABLE, reason, is_lost=True)


def status_name(status: int) -> str:
    """Returns the name of a gRPC status code."""
    return STATUS_NAMES.get(status) or f"status {status}"


def reset_reply(code: int) -> Reply:
    """Returns the reply to a call whose stream the shard reset with an HTTP/2 error code."""
    status = STATUS_BY_RESET.get(code, INTERNAL)  # type: ignore[call-overload]
    return Reply(
        status,
        f"the shard reset the stream with code {code}",
        retry_after_s=RESET_RETRY_S if status == RESOURCE_EXHAUSTED else 0,
        is_lost=code == ErrorCode.REFUSED_STREAM,
    )


@dataclass(frozen=True, slots=True)
class ResponseHeaders:
    """The fields of a header block or of trailers that decide how a call ends.

    Attributes:
        http_status: HTTP status; 0 in trailers.
        status: gRPC status; None if it is missing.
        message: status message.
        retry_after_s: value of retry-after; 0 if it is missing.
    """

    http_status: int
    status: int | None
    message: str
    retry_after_s: int

    @property
    def is_informational(self) -> bool:
        """Whether these are interim headers (1xx), which precede those of the response."""
        return 100 <= self.http_status < 200

    def reply(self, payload: bytes = b"") -> Reply:
        """Returns the reply to a call that ends with these headers."""
        if self.status is None:
            if self.http_status not in (0, 200):
                status = STATUS_BY_HTTP.get(self.http_status, UNKNOWN)
                return Reply(status, f"the shard answered with HTTP status {self.http_status}")
            return Reply(UNKNOWN, "the response has no grpc-status")
        return Reply(self.status, self.message, payload, self.retry_after_s)


def read_response_headers(headers: Headers) -> ResponseHeaders:
    """Returns the relevant fields of ``headers``. A malformed grpc-status becomes UNKNOWN."""
    fields = dict(headers)
    http_status = _number(fields.get(b":status", b"")) or 0
    status: int | None = None
    if (value := fields.get(b"grpc-status")) is not None:
        status = _number(value)
        if status is None or status > STATUS_MAX:
            shown = value[:20].decode("latin-1")
            return ResponseHeaders(http_status, UNKNOWN, f"grpc-status is {shown!r}", 0)
    message = unquote(fields.get(b"grpc-message", b"").decode("latin-1"), errors="replace")
    retry_after_s = _number(fields.get(b"retry-after", b"")) or 0
    return ResponseHeaders(http_status, status, message, retry_after_s)


def _number(value: bytes) -> int | None:
    return int(value) if value.isdigit() and len(value) <= NUMBER_DIGITS_MAX else None


def read_message(chunks: Sequence[memoryview], nbytes: int) -> bytes | None:
    """Returns the message if ``chunks`` are exactly one uncompressed message, otherwise None.

    The message is copied once.

    Args:
        chunks: payloads of the DATA frames, none of them empty.
        nbytes: bytes in ``chunks``.
    """
    if nbytes < PREFIX_BYTES:
        return None
    first = chunks[0]
    if len(first) < PREFIX_BYTES:
        first = memoryview(b"".join(chunks))
        chunks = (first,)
    if PREFIX.unpack_from(first) != (0, nbytes - PREFIX_BYTES):
        return None
    if len(chunks) == 1:
        return bytes(first[PREFIX_BYTES:])
    return b"".join((first[PREFIX_BYTES:], *chunks[1:]))
