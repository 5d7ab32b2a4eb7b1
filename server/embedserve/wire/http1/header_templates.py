"""Template cache for the headers of embed requests over HTTP/1.

A caller repeats the same few request lines and headers, except for some values: trace, request id,
token, length. New headers are parsed by llhttp and cached as a template with gaps for such values.
Later headers are compared with the templates of the same length. Anything but a plain embed
request is parsed by llhttp: chunked bodies, Expect, headers that arrive in several reads, other
methods, versions and routes.
"""

from __future__ import annotations

import re

from embedserve.access.authenticator import LIST_HEADERS
from embedserve.codec.codec import Codecs
from embedserve.config import Limits
from embedserve.errors import EmbedServeError
from embedserve.metrics.request_metrics import ProtocolMetrics
from embedserve.pipeline import RequestOptions
from embedserve.tracing.request_id import REQUEST_ID
from embedserve.tracing.trace_context import TRACEPARENT
from embedserve.wire.allowed_hosts import AllowedHosts
from embedserve.wire.http1.request_parser import BLANKS, HEAD_BYTES_MAX, RequestParser
from embedserve.wire.http_stream import LENGTH_DIGITS_MAX, HttpRequest
from embedserve.wire.rest.headers import (
    JSON_LENGTH,
    embed_route,
    infer_codec,
    parse_timeout_ms,
    read_headers,
)

TEMPLATES_MAX = 1024
"""Templates cached for all lengths together; the cache is cleared when it is full."""
TEMPLATES_PER_LENGTH_MAX = 8
"""Templates cached per header length; a new one evicts the oldest."""

LITERAL_HEADERS = {b"accept", b"connection", b"content-encoding", b"content-type", b"host"}
"""Headers whose values are literal in a template: those that `read_headers` parses, or that decide
how a request is read. The values of all other headers are gaps: the few that count are read from
the gaps of each request."""
UNREPEATED_HEADERS = (b"authorization", REQUEST_ID, TRACEPARENT, *LIST_HEADERS)
"""Headers that no template has twice. If a request repeats such a header, llhttp parses it, and
headers_by_name decides its value."""
SPECIAL_HEADERS = {b"transfer-encoding", b"expect", b"upgrade"}
"""Headers of requests that are no plain embed requests, and have no template."""
SPECIAL_CHARACTERS = set("%?#")
"""Characters of a URL that is not a literal path, and has no template."""
CONTROLS = bytes(c for c in (*range(32), 127) if c != ord("\t"))
"""Control characters: never part of a header value (RFC 9110, section 5.5), or the end of a line.
"""
_LINE = re.compile(rb"\r\n([^:\r\n]+):[ \t]*+([^\r\n]*+)(?=\r\n)")
"""Header line: its name, and its value with any blanks at the end. No blank is matched twice, so
that a long run takes linear time."""


class HeaderTemplate:
    """Template of plain embed requests' headers: literal bytes with gaps for variable values.

    Attributes:
        options: request options, without the timeout and the length of the body's JSON.
        authorization: gap of the authorization header; None if there is no such header.
        body_bytes_max: limit of the body in bytes.
        gaps: (name, start, end) of each variable value.
    """

    __slots__ = (
        "_codecs",
        "_gap_of",
        "_json_length_gap",
        "_last",
        "_last_length",
        "_length_gap",
        "_literals",
        "_printing_bytes",
        "_timeout_gap",
        "authorization",
        "body_bytes_max",
        "gaps",
        "options",
    )

    def __init__(
        self, head: bytes, options: RequestOptions, body_bytes_max: int, codecs: Codecs
    ) -> None:
        """
        Args:
            head: request line and headers with their empty line, as validated by llhttp.
        """
        self.options = options
        self._codecs = codecs
        self.body_bytes_max = body_bytes_max
        self.gaps: list[tuple[bytes, int, int]] = []
        literals = []
        start = 0
        for line in _LINE.finditer(head):
            name = line[1].lower()
            if name in LITERAL_HEADERS:
                continue
            self.gaps.append((name, *line.span(2)))
            literals.append((start, head[start : line.start(2)]))
            start = line.end(2)
        literals.append((start, head[start:]))
        self._literals = tuple(literals)
        self._printing_bytes = len(head.translate(None, CONTROLS))
        self._last, self._last_length = b"\0", -1  # last match, and its content length
        self._gap_of = {name: slice(start, end) for name, start, end in self.gaps}
        self.authorization = self._gap_of.get(b"authorization")
        self._length_gap = self._gap_of.get(b"content-length")
        self._timeout_gap = self._gap_of.get(b"x-timeout-ms")
        self._json_length_gap = self._gap_of.get(JSON_LENGTH)

    def match(self, data: bytes, end: int) -> int:
        """Returns the content length of the headers data[:end] if they match; -1 if they do not.

        A value with a line break would add headers, and any other control character is invalid.
        The headers must therefore have only the control characters of the template.
        """
        if data.startswith(self._last):
            return self._last_length
        for start, literal in self._literals:
            if not data.startswith(literal, start):
                return -1
        head = data[:end]
        if len(head.translate(None, CONTROLS)) != self._printing_bytes:
            return -1
        digits = head[self._length_gap]  # type: ignore[index]  # every template has a content-length
        if not digits.isdigit() or len(digits) > LENGTH_DIGITS_MAX:
            return -1
        self._last, self._last_length = head, int(digits)
        return self._last_length

    def header(self, head: bytes, name: bytes) -> bytes | None:
        """Returns the value of the gap of ``name`` in ``head``; None if there is no such gap."""
        gap = self._gap_of.get(name)
        return None if gap is None else head[gap].strip(BLANKS)

    def options_of(self, data: bytes) -> RequestOptions:
        """Returns the request options of the headers at the front of ``data``.

        Raises:
            InvalidRequestError: X-Timeout-Ms is not a positive number, or the declared JSON length
                is no length.
        """
        one = self.options
        if self._timeout_gap is None and self._json_length_gap is None:
            return one
        codec, timeout_s = one.codec, one.timeout_s
        if self._timeout_gap is not None:
            timeout_s = parse_timeout_ms(data[self._timeout_gap].strip(BLANKS))
        if self._json_length_gap is not None and one.codec.json_bytes is not None:
            codec = infer_codec(self._codecs, data[self._json_length_gap].strip(BLANKS))
        return RequestOptions(
            one.model, codec, one.response_codec, timeout_s, one.metrics, one.has_id
        )


class HeaderTemplateCache:
    """Cache of header templates by header length, shared by the connections of a server."""

    def __init__(
        self,
        metrics: ProtocolMetrics,
        limits: Limits,
        codecs: Codecs,
        allowed_hosts: AllowedHosts | None = None,
    ) -> None:
        """
        Args:
            metrics: REST metrics, part of the request options.
            allowed_hosts: allowed Host names; None: any.
        """
        self._metrics = metrics
        self._limits = limits
        self._codecs = codecs
        self._allowed_hosts = allowed_hosts
        self._templates: dict[int, list[HeaderTemplate]] = {}
        self._count = 0

    def match_or_learn(self, data: bytes, end: int) -> tuple[HeaderTemplate, int] | None:
        """Returns (template, content length) for the headers data[:end] with their empty line.

        Headers that no template matches are parsed, and become a template if they are those of a
        plain embed request. Returns None if they are not: llhttp parses the request once more.
        """
        for template in self._templates.get(end, ()):
            length = template.match(data, end)
            if length >= 0:
                return template, length
        return self._learn(data[:end])

    def _learn(self, head: bytes) -> tuple[HeaderTemplate, int] | None:
        if len(head) > HEAD_BYTES_MAX:
            return None
        template = self.parse(head)
        length = -1 if template is None else template.match(head, len(head))
        if template is None or length < 0:
            return None
        if self._count >= TEMPLATES_MAX:
            self._templates.clear()
            self._count = 0
        templates = self._templates.setdefault(len(head), [])
        if len(templates) >= TEMPLATES_PER_LENGTH_MAX:
            templates.pop()
            self._count -= 1
        templates.insert(0, template)
        self._count += 1
        return template, length

    def parse(self, head: bytes) -> HeaderTemplate | None:
        """Parses ``head`` (with its empty line), and returns its template, or None.

        Only a plain embed request to one of ``allowed_hosts`` has a template.
        """
        plain = _PlainRequest()
        try:
            RequestParser(plain, b"http").feed(head)
        except EmbedServeError:
            return None
        request = plain.request
        if request is None or request.content_length is None:
            return None
        names = [name for name, _ in request.headers]
        if SPECIAL_HEADERS.intersection(names):
            return None
        if any(names.count(name) > 1 for name in UNREPEATED_HEADERS):
            return None
        path = request.target.decode("latin-1")
        route = embed_route(path)
        if route is None or not SPECIAL_CHARACTERS.isdisjoint(path):
            return None
        if not head.startswith(b"POST %b " % request.target):
            return None  # an absolute URL
        try:
            if self._allowed_hosts is not None:
                self._allowed_hosts.check(request.headers)
            options = read_headers(route, request.headers, self._metrics, self._codecs)
        except EmbedServeError:
            return None
        bytes_max = options.codec.bytes_max(self._limits)
        template = HeaderTemplate(head, options, bytes_max, self._codecs)
        # No template where llhttp and the pattern disagree, as on folded lines.
        return template if len(_LINE.findall(head)) == len(names) else None


class _PlainRequest:
    """Receiver of a request's headers.

    Attributes:
        request: the request; None unless its headers are complete, of a POST of HTTP/1.1 with
            keep-alive.
    """

    request: HttpRequest | None = None

    def begin_request(self, request: HttpRequest, *, is_1_0: bool, is_last: bool) -> None:
        if request.method == b"POST" and not (is_1_0 or is_last):
            self.request = request

    def receive_body(self, data: bytes) -> None: ...

    def end_request(self) -> None: ...
