"""What a head of HTTP/1 may be, past what llhttp finds right: as RFC 9112 has it, and limits."""

from __future__ import annotations

from embedserve.config import Limits
from embedserve.errors import InvalidRequestError
from embedserve.wire.rest import (
    JSON_LENGTH,
    Headers,
    VersionError,
    codec_of,
    headers_too_large,
)

BLANKS = b" \t"
"""Optional whitespace, of which none is part of a value (RFC 9110, section 5.5)."""
HEAD_BYTES_MAX = 16 << 10
HEAD_LINES_MAX = 100
VERSIONS = ("1.0", "1.1")


def check_headers(version: str, url: bytes, headers: Headers, limits: Limits) -> None:
    """Checks a head that has come whole.

    Args:
        version: such as "1.1".
        headers: names in lower case.
        limits: on the body, which depends on its type.

    Raises:
        HeadersTooLargeError: it has more bytes or lines than the limits.
        VersionError: it is of another version.
        InvalidRequestError: it has not one Host, which HTTP/1.1 wants, or no length of its JSON
            where it says one.
        RequestTooLargeError: it declares a larger body.
    """
    nbytes = len(url) + sum([len(name) + len(value) + 4 for name, value in headers])
    if nbytes > HEAD_BYTES_MAX:
        raise headers_too_large(nbytes, "bytes", HEAD_BYTES_MAX)
    if len(headers) > HEAD_LINES_MAX:
        raise headers_too_large(len(headers), "lines", HEAD_LINES_MAX)
    if version not in VERSIONS:
        raise VersionError(f"the request says HTTP/{version}: send HTTP/1.1")
    names = [name for name, _ in headers]
    hosts = names.count(b"host")
    if hosts > 1 or (version == "1.1" and not hosts):
        raise InvalidRequestError(f"there are {hosts} Host headers, expected one", "Host")
    if b"content-length" in names:
        nbytes = int(headers[names.index(b"content-length")][1])
        values = dict(headers)
        path = url.partition(b"?")[0].decode("latin-1")
        codec = codec_of(path, values.get(b"content-type", b""), values.get(JSON_LENGTH, b""))
        codec.check_size(nbytes, limits)
