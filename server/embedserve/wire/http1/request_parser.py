"""Parser of HTTP/1 requests over llhttp, with limits on their headers. Without I/O."""

from __future__ import annotations

from time import perf_counter
from typing import Protocol

import httptools

from embedserve.errors import EmbedServeError, InvalidRequestError
from embedserve.wire.http_stream import Headers, HttpRequest
from embedserve.wire.rest.headers import HttpVersionError, TransferCodingError, headers_too_large

BLANKS = b" \t"
"""Optional whitespace around a header value, not part of it (RFC 9110, section 5.5)."""
HEAD_BYTES_MAX, HEAD_LINES_MAX = 16 << 10, 100
"""Bytes of a request's URL and headers, or of trailers, and header lines; more are rejected."""
VERSIONS = ("1.0", "1.1")
URL_BYTES_SHOWN = 200
"""Bytes of an invalid URL that the error message quotes."""
HEAD_COPIES = 3
"""Memory of incomplete headers, as a multiple of their bytes: raw lines, parsed headers, and the
overhead of both."""


class RequestReceiver(Protocol):
    """Receiver of what a RequestParser has parsed."""

    def begin_request(self, request: HttpRequest, *, is_1_0: bool, is_last: bool) -> None:
        """Takes the headers of the next request.

        ``is_1_0`` is whether the client speaks HTTP/1.0, ``is_last`` whether it wants the
        connection to end with the response. May raise EmbedServeError.
        """

    def receive_body(self, data: bytes) -> None:
        """Takes the next chunk of the request's body."""

    def end_request(self) -> None:
        """Handles the end of the request."""


class RequestParser:
    """Parser of one connection's requests.

    Attributes:
        message_since_s: perf_counter start of the request being parsed; 0: none.
        is_in_head: whether headers are incomplete.
        is_in_body: whether a body is incomplete.
        body_bytes: bytes received of the incomplete body.
    """

    def __init__(self, receiver: RequestReceiver, scheme: bytes) -> None:
        self._receiver = receiver
        self._scheme = scheme
        self._llhttp = httptools.HttpRequestParser(self)
        self.message_since_s = 0.0
        self.is_in_head = self.is_in_body = False
        self.body_bytes = 0
        self._head_bytes = 0  # of incomplete headers or trailers, in chunks with nothing else
        self._has_only_trailers = False  # since the last chunk was fed
        self._url = b""
        self._headers: Headers = []

    def feed(self, data: bytes) -> None:
        """Parses the next chunk of a connection's data.

        Raises:
            EmbedServeError: the request is malformed or too large; nothing more may be fed.
        """
        was_in_head = self.is_in_head
        rest: bytes | None = None
        try:
            self._llhttp.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, EmbedServeError):
                raise error.__context__ from None  # a callback below has rejected it
            raise InvalidRequestError(f"not a request of HTTP/1.1: {error}") from None
        if rest is not None:  # parsed here, where its errors have no other error as their context
            self._feed_without_upgrade(rest)
            return
        if (was_in_head and self.is_in_head) or self._has_only_trailers:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                raise headers_too_large(self._head_bytes, "bytes", HEAD_BYTES_MAX)
        self._has_only_trailers = self.is_in_body

    def _feed_without_upgrade(self, rest: bytes) -> None:
        """Parses a request again without its Upgrade header, which RFC 9110 lets a server ignore.

        ``rest`` is the data behind the headers.
        """
        method, version = self._llhttp.get_method(), self._llhttp.get_http_version().encode()
        if method == b"CONNECT":
            raise InvalidRequestError("method is CONNECT: this is no proxy")
        lines = [b"%b %b HTTP/%b\r\n" % (method, self._url, version)]
        lines += [b"%b: %b\r\n" % one for one in self._headers if one[0] != b"upgrade"]
        self._llhttp = httptools.HttpRequestParser(self)
        self.feed(b"".join((*lines, b"\r\n", rest)))

    def incomplete_request(self) -> HttpRequest:
        """Returns the request being parsed, with the headers received so far."""
        return HttpRequest(self._llhttp.get_method(), self._scheme, self._url, self._headers)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the request being parsed takes."""
        return self.body_bytes + HEAD_COPIES * self._head_bytes

    # Callbacks of llhttp

    def on_message_begin(self) -> None:
        self.message_since_s = perf_counter()
        self.is_in_head = True
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_in_head:  # trailers are dropped
            # llhttp strips leading blanks.
            self._headers.append((name.lower(), value.rstrip(BLANKS)))

    def on_headers_complete(self) -> None:
        if self._llhttp.should_upgrade():
            return
        self.is_in_head = False
        self._head_bytes = 0
        version, headers = self._llhttp.get_http_version(), self._headers
        length = _check_headers(version, self._url, headers)
        method = self._llhttp.get_method()
        is_1_0 = version == "1.0"
        self._receiver.begin_request(
            HttpRequest(method, self._scheme, self._target(), headers, content_length=length),
            is_1_0=is_1_0,
            is_last=is_1_0 or not self._llhttp.should_keep_alive(),
        )
        self.is_in_body = True

    def _target(self) -> bytes:
        """Returns the path and query of the request's URL, which may be absolute."""
        if self._url.startswith(b"/"):
            return self._url
        try:
            url = httptools.parse_url(self._url)
        except httptools.HttpParserInvalidURLError:
            shown = self._url[:URL_BYTES_SHOWN].decode("latin-1")
            raise InvalidRequestError(f"not a request of HTTP/1.1: its URL is {shown!r}") from None
        path: bytes = url.path or b"/"
        return path if url.query is None else b"%b?%b" % (path, url.query)

    def on_chunk_header(self) -> None:
        self._has_only_trailers = False
        self._head_bytes = 0

    def on_body(self, body: bytes) -> None:
        self.on_chunk_header()
        self.body_bytes += len(body)
        self._receiver.receive_body(body)

    def on_message_complete(self) -> None:
        if self._llhttp.should_upgrade():
            return
        self.is_in_body = self._has_only_trailers = False
        self._head_bytes = self.body_bytes = 0
        self.message_since_s = 0.0
        self._receiver.end_request()


def _check_headers(version: str, url: bytes, headers: Headers) -> int | None:
    """Validates complete headers, by limits and by rules of RFC 9112 that llhttp does not check.

    Returns:
        declared length of the body; None if not declared.

    Raises:
        HeadersTooLargeError: the headers exceed HEAD_BYTES_MAX or HEAD_LINES_MAX.
        HttpVersionError: the version is none of VERSIONS.
        TransferCodingError: the body has a transfer coding other than chunked.
        InvalidRequestError: the Host header is missing (HTTP/1.1) or repeated.
    """
    nbytes = len(url) + sum([len(name) + len(value) + 4 for name, value in headers])
    if nbytes > HEAD_BYTES_MAX:
        raise headers_too_large(nbytes, "bytes", HEAD_BYTES_MAX)
    if len(headers) > HEAD_LINES_MAX:
        raise headers_too_large(len(headers), "lines", HEAD_LINES_MAX)
    if version not in VERSIONS:
        raise HttpVersionError(f"the request says HTTP/{version}: send HTTP/1.1")
    names = [name for name, _ in headers]
    hosts = names.count(b"host")
    if hosts > 1 or (version == "1.1" and not hosts):
        raise InvalidRequestError(f"there are {hosts} Host headers, expected one", "Host")
    for name, value in headers:
        if name == b"transfer-encoding" and value.lower() != b"chunked":
            shown = value.decode("latin-1")
            raise TransferCodingError(
                f"Transfer-Encoding is {shown!r}, expected 'chunked'", "Transfer-Encoding"
            )
    lengths = [int(value) for name, value in headers if name == b"content-length"]
    return lengths[0] if lengths else None
