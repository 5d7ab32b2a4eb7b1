"""Remembers what the head of an embed request asks for.

A connection's requests have the same few heads (request line and headers) over and over, so that
one is parsed, by llhttp, only when it is new. Heads that ask for anything but a plain embed
request are left to uvicorn: chunked bodies, Expect, other methods, versions and routes.
"""

from __future__ import annotations

from dataclasses import dataclass

import httptools

from embedserve.errors import EmbedServeError
from embedserve.wire.rest import Call, Headers, embed_route, read_headers

HEAD_BYTES_MAX = 2048
HEADS_MAX = 4096
"""Bodies of other lengths have other heads; past this many, all are forgotten."""
SPECIAL_HEADERS = {b"transfer-encoding", b"expect", b"upgrade"}

SPECIAL_CHARACTERS = set("%?#")
"""Of a URL: more than a path as it is."""


@dataclass(frozen=True, slots=True)
class Head:
    """A plain POST of an embed request: HTTP/1.1, kept alive, with the length of its body.

    Attributes:
        model: of the URL; "" for the default model.
        content_length: bytes of the body.
    """

    model: str
    call: Call
    content_length: int


class RequestHeads:
    """The heads seen so far; shared by the connections of a server."""

    def __init__(self) -> None:
        self._heads: dict[bytes, Head | None] = {}

    def get(self, head: bytes) -> Head | None:
        """What ``head`` (with its empty line) asks for; None for what uvicorn should see to."""
        try:
            return self._heads[head]
        except KeyError:
            if len(head) > HEAD_BYTES_MAX:
                return None
            if len(self._heads) >= HEADS_MAX:
                self._heads.clear()
            self._heads[head] = parsed = parse_head(head)
            return parsed


def parse_head(head: bytes) -> Head | None:
    """``head`` (with its empty line) if it is that of a plain embed request."""
    reader = _Reader()
    try:
        reader.parser.feed_data(head)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    if not reader.is_plain:
        return None
    names = {name for name, _ in reader.headers}
    if names & SPECIAL_HEADERS or b"content-length" not in names:
        return None
    url = reader.url.decode("latin-1")
    model = embed_route(url)
    if model is None or not SPECIAL_CHARACTERS.isdisjoint(url):
        return None
    try:
        call = read_headers(reader.headers)
    except EmbedServeError:
        return None
    return Head(model, call, int(dict(reader.headers)[b"content-length"]))


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
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        # Asked here: at the end of the message, which an empty body is, llhttp starts anew.
        self.is_plain = (
            self.parser.get_method() == b"POST"
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
        )
