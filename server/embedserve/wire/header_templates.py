"""Matches the head of an embed request over HTTP/1 without what differs from request to request.

A caller's requests have the same few heads (request line and headers) over and over, but for the
values of some headers: a trace, a request's id, a token, a length. A head that is new is parsed,
by llhttp, and remembered as a form with gaps where such values stand; what comes next is compared
with the forms of its length. Heads that ask for anything but a plain embed request are left to
uvicorn: chunked bodies, Expect, other methods, versions and routes.
"""

from __future__ import annotations

import re

import httptools

from embedserve.access.authenticator import LIST_HEADERS
from embedserve.config import Limits
from embedserve.errors import EmbedServeError
from embedserve.metrics.metrics import ProtocolMetrics
from embedserve.pipeline import RequestOptions
from embedserve.tracing.request_id import REQUEST_ID
from embedserve.tracing.trace_context import TRACEPARENT
from embedserve.wire.allowed_hosts import AllowedHosts
from embedserve.wire.header_validation import BLANKS, HEAD_BYTES_MAX, HEAD_LINES_MAX
from embedserve.wire.rest import (
    JSON_LENGTH,
    Headers,
    embed_route,
    infer_codec,
    read_headers,
    timeout_s,
)

FORMS_MAX = 1024
"""Remembered of all lengths; past it all are forgotten."""
FORMS_PER_LENGTH_MAX = 8
"""The oldest goes for a new one."""

READ_HEADERS = {
    b"accept",
    b"connection",
    b"content-encoding",
    b"content-type",
    b"expect",
    b"host",
    b"keep-alive",
    b"transfer-encoding",
    b"upgrade",
}
"""Those whose values decide what becomes of a request; of others the values are gaps."""
SEVERAL_HEADERS = (b"authorization", REQUEST_ID, TRACEPARENT, *LIST_HEADERS)
"""Headers that a template has once: where a request has several, headers_by_name says what they
count as."""
SPECIAL_HEADERS = {b"transfer-encoding", b"expect", b"upgrade"}
SPECIAL_CHARACTERS = set("%?#")
"""Of a URL: more than a path as it is."""
LENGTH_DIGITS_MAX = 19
CONTROLS = bytes(c for c in (*range(32), 127) if c != ord("\t"))
"""What no value holds (RFC 9110, section 5.5), and what ends a line."""
_LINE = re.compile(rb"\r\n([^:\r\n]+):[ \t]*([^\r\n]*?)[ \t]*(?=\r\n)")


class HeaderTemplate:
    """Heads of plain embed requests that are equal but for the values in their gaps.

    Attributes:
        asked: what they ask for, but for a timeout and how long a body's JSON is.
        authorization: the gap of this header; None where they have none.
        body_bytes_max: of the body that follows.
        gaps: (name, start, end) of each value.
    """

    __slots__ = (
        "_gap_of",
        "_json_length_gap",
        "_last",
        "_last_length",
        "_length_gap",
        "_parts",
        "_printing_bytes",
        "_timeout_gap",
        "authorization",
        "body_bytes_max",
        "gaps",
        "options",
    )

    def __init__(self, head: bytes, options: RequestOptions, body_bytes_max: int) -> None:
        """``head`` with its empty line, which llhttp has found right."""
        self.options = options
        self.body_bytes_max = body_bytes_max
        self.gaps: list[tuple[bytes, int, int]] = []
        parts = []
        start = 0
        for line in _LINE.finditer(head):
            name = line[1].lower()
            if name in READ_HEADERS:
                continue
            self.gaps.append((name, *line.span(2)))
            parts.append((start, head[start : line.start(2)]))
            start = line.end(2)
        parts.append((start, head[start:]))
        self._parts = tuple(parts)
        self._printing_bytes = len(head.translate(None, CONTROLS))
        self._last, self._last_length = b"\0", -1  # the head that matched last, and its length
        self._gap_of = {name: slice(start, end) for name, start, end in self.gaps}
        self.authorization = self._gap_of.get(b"authorization")
        self._length_gap = self._gap_of.get(b"content-length")
        self._timeout_gap = self._gap_of.get(b"x-timeout-ms")
        self._json_length_gap = self._gap_of.get(JSON_LENGTH)

    def content_length(self, data: bytes, end: int) -> int:
        """Of the body that follows the head data[:end]; -1 if that is another head.

        A value that breaks its line would be headers of its own, and one with another control
        character is none: those that the form has must be all.
        """
        if data.startswith(self._last):
            return self._last_length
        for start, part in self._parts:
            if not data.startswith(part, start):
                return -1
        head = data[:end]
        if len(head.translate(None, CONTROLS)) != self._printing_bytes:
            return -1
        digits = head[self._length_gap]  # type: ignore[index]  # a form without one is not made
        if not digits.isdigit() or len(digits) > LENGTH_DIGITS_MAX:
            return -1
        self._last, self._last_length = head, int(digits)
        return self._last_length

    def header(self, head: bytes, name: bytes) -> bytes | None:
        """The value that stands in the gap of ``name`` in ``head``, if the form has one."""
        gap = self._gap_of.get(name)
        return None if gap is None else head[gap].strip(BLANKS)

    def asked_by(self, data: bytes) -> RequestOptions:
        """What the head at the front of ``data`` asks for.

        Raises:
            InvalidRequestError: its X-Timeout-Ms is none, or what it says of its JSON no length.
        """
        one = self.options
        if self._timeout_gap is None and self._json_length_gap is None:
            return one
        codec, wanted_s = one.codec, one.timeout_s
        if self._timeout_gap is not None:
            wanted_s = timeout_s(data[self._timeout_gap].strip(BLANKS))
        if self._json_length_gap is not None and one.codec.head_bytes is not None:
            codec = infer_codec(data[self._json_length_gap].strip(BLANKS))
        return RequestOptions(
            one.model, codec, one.response_codec, wanted_s, one.metrics, one.has_id
        )


class HeaderTemplateCache:
    """The forms of the heads seen so far; shared by the connections of a server."""

    def __init__(
        self, metrics: ProtocolMetrics, limits: Limits, allowed_hosts: AllowedHosts | None = None
    ) -> None:
        """
        Args:
            allowed_hosts: that heads may name; None: any.
        """
        self._metrics = metrics
        self._limits = limits
        self.allowed_hosts = allowed_hosts
        self._forms: dict[int, list[HeaderTemplate]] = {}
        self._count = 0

    def match(self, data: bytes, end: int) -> tuple[HeaderTemplate, int] | None:
        """The form of the head data[:end] (with its empty line) and the length of the body that
        follows; None for what uvicorn should see to."""
        for form in self._forms.get(end, ()):
            length = form.content_length(data, end)
            if length >= 0:
                return form, length
        return self._remember(data[:end])

    def _remember(self, head: bytes) -> tuple[HeaderTemplate, int] | None:
        if len(head) > HEAD_BYTES_MAX:
            return None
        form = parse_head(head, self._metrics, self._limits, self.allowed_hosts)
        length = -1 if form is None else form.content_length(head, len(head))
        if form is None or length < 0:
            return None
        if self._count >= FORMS_MAX:
            self._forms.clear()
            self._count = 0
        forms = self._forms.setdefault(len(head), [])
        if len(forms) >= FORMS_PER_LENGTH_MAX:
            forms.pop()
            self._count -= 1
        forms.insert(0, form)
        self._count += 1
        return form, length


def parse_head(
    head: bytes, metrics: ProtocolMetrics, limits: Limits, allowed_hosts: AllowedHosts | None = None
) -> HeaderTemplate | None:
    """The form of ``head`` (with its empty line) if it is that of a plain embed request, to one of
    ``allowed_hosts``."""
    reader = _Reader()
    try:
        reader.parser.feed_data(head)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    if not reader.is_plain:
        return None
    names = [name for name, _ in reader.headers]
    if SPECIAL_HEADERS.intersection(names) or len(names) > HEAD_LINES_MAX:
        return None
    if any(names.count(name) != 1 for name in (b"content-length", b"host")):
        return None
    if any(names.count(name) > 1 for name in SEVERAL_HEADERS):
        return None
    url = reader.url.decode("latin-1")
    route = embed_route(url)
    if route is None or not SPECIAL_CHARACTERS.isdisjoint(url):
        return None
    try:
        if allowed_hosts is not None:
            allowed_hosts.check(reader.headers)
        options = read_headers(route, reader.headers, metrics)
    except EmbedServeError:
        return None
    form = HeaderTemplate(head, options, options.codec.bytes_max(limits))
    # What llhttp and the pattern see differently, such as folded lines, has no form.
    return form if len(_LINE.findall(head)) == len(names) else None


class _Reader:
    """What llhttp finds in a head.

    Attributes:
        is_plain: it is whole, a POST of HTTP/1.1, and its connection is kept alive.
    """

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.url = b""
        self.headers: Headers = []
        self.is_plain = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.rstrip(BLANKS)))

    def on_headers_complete(self) -> None:
        # Asked here: at the end of the message, which an empty body is, llhttp starts anew.
        self.is_plain = (
            self.parser.get_method() == b"POST"
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
        )
