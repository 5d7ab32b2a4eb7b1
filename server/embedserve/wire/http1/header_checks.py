"""Validation of HTTP/1 headers beyond llhttp's checks: rules of RFC 9112, and limits."""

from __future__ import annotations

from embedserve.errors import InvalidRequestError
from embedserve.wire.http_stream import Headers
from embedserve.wire.rest.headers import VersionError, headers_too_large

BLANKS = b" \t"
"""Optional whitespace around a header value, not part of it (RFC 9110, section 5.5)."""
HEAD_BYTES_MAX = 16 << 10
HEAD_LINES_MAX = 100
VERSIONS = ("1.0", "1.1")


def check_headers(version: str, url: bytes, headers: Headers) -> int | None:
    """Validates the complete headers of a request.

    Args:
        version: HTTP version, such as "1.1".
        url: request target.
        headers: headers with names in lower case.

    Returns:
        declared length of the body; None if not declared.

    Raises:
        HeadersTooLargeError: the headers exceed HEAD_BYTES_MAX or HEAD_LINES_MAX.
        VersionError: the version is none of VERSIONS.
        InvalidRequestError: the Host header is missing (HTTP/1.1) or repeated.
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
    lengths = [int(value) for name, value in headers if name == b"content-length"]
    return lengths[0] if lengths else None
