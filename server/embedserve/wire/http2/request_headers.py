"""Validation of HTTP/2 request headers (RFC 9113, section 8), and the types of resolved routes.

Headers are validated once per distinct header block; the result is cached with the block.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from embedserve.wire.http2.stream import Stream
from embedserve.wire.http_stream import LENGTH_DIGITS_MAX, Handler, Headers, HttpRequest

PSEUDO = {b":method", b":scheme", b":path", b":authority"}
CONNECTION_SPECIFIC = {
    b"connection",
    b"keep-alive",
    b"proxy-connection",
    b"transfer-encoding",
    b"upgrade",
}
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_METHOD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(rb"[^\0\r\n]*")


@dataclass(frozen=True, slots=True)
class ResolvedRoute:
    """Resolved route of a header block.

    Attributes:
        make_handler: factory of the handler for a stream with these headers.
        content_length: declared length of the body; None if not declared.
    """

    make_handler: Callable[[Stream], Handler]
    content_length: int | None


ResolveRoute = Callable[[Headers], ResolvedRoute | str]
"""Resolver of request headers to a route; returns an error message for malformed headers."""


def read_request(headers: Headers) -> HttpRequest | str:
    """Returns the validated request, or an error message if ``headers`` are malformed."""
    pseudo: dict[bytes, bytes] = {}
    regular: Headers = []
    for name, value in headers:
        if name.startswith(b":"):
            if regular or name in pseudo or name not in PSEUDO:
                return f"a misplaced pseudo-header: {_shown(name)}"
            if not _is_value(value):
                return f"the value of {_shown(name)} is malformed"
            pseudo[name] = value
            continue
        if wrong := wrong_header(name, value):
            return wrong
        regular.append((name, value))
    method, scheme, target = (pseudo.get(name, b"") for name in (b":method", b":scheme", b":path"))
    if not method or not scheme or not target:
        return "a pseudo-header is missing: :method, :scheme or :path"
    if not _METHOD.fullmatch(method):
        return ":method is malformed"
    if target[:1] != b"/" and not (target == b"*" and method == b"OPTIONS"):
        return ":path does not begin with '/'"
    lengths = {value for name, value in regular if name == b"content-length"}
    if any(not value.isdigit() or len(value) > LENGTH_DIGITS_MAX for value in lengths):
        return "content-length is not a number"
    if len(lengths) > 1:
        return "content-length is given twice"
    hosts = [value for name, value in regular if name == b"host"]
    authority = pseudo.get(b":authority")
    if len(hosts) > 1:
        return "host is given twice"
    if authority is not None and hosts and hosts[0].lower() != authority.lower():
        return "host is not :authority"
    if authority is not None and not hosts:
        regular.append((b"host", authority))
    return HttpRequest(
        method,
        scheme,
        target,
        regular,
        sum(len(name) + len(value) + 32 for name, value in headers),
        int(lengths.pop()) if lengths else None,
    )


def wrong_header(name: bytes, value: bytes) -> str:
    """Returns an error message for a malformed regular header; "" if it is valid."""
    if not _NAME.fullmatch(name):
        return f"a header's name is malformed: {_shown(name)}"
    if not _is_value(value):
        return f"the value of {_shown(name)} is malformed"
    if name in CONNECTION_SPECIFIC or (name == b"te" and value != b"trailers"):
        return f"{_shown(name)} is not allowed in HTTP/2"
    return ""


def _is_value(value: bytes) -> bool:
    return _VALUE.fullmatch(value) is not None and value == value.strip(b" \t")


def _shown(name: bytes) -> str:
    return name[:64].decode("ascii", "replace")
