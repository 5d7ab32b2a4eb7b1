"""Heads of requests: which are answered without uvicorn, and how many are remembered."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedserve.wire import heads as request_heads
from embedserve.wire.heads import HEAD_BYTES_MAX, Head, RequestHeads, parse_head
from embedserve.wire.rest import Call

PLAIN = Call(body_is_protobuf=False, answer_is_protobuf=False, timeout_s=None)


def head_of(*lines: str, url: str = "/embed", length: int = 5) -> bytes:
    first = f"POST {url} HTTP/1.1"
    return "\r\n".join([first, "Host: h", *lines, f"Content-Length: {length}", "", ""]).encode()


@pytest.mark.parametrize(
    ("url", "model"), [("/embed", ""), ("/models/shop/embed", "shop"), ("/models/a.b/embed", "a.b")]
)
def test_a_plain_head_names_its_model_and_length(url: str, model: str) -> None:
    assert parse_head(head_of(url=url, length=12)) == Head(model, PLAIN, 12)


def test_a_head_says_the_formats_and_the_timeout_in_any_case() -> None:
    head = head_of("CONTENT-TYPE: Application/X-Protobuf", "accept: */*", "x-timeout-MS: 20")
    assert parse_head(head) == Head("", Call(True, True, 0.02), 5)


@pytest.mark.parametrize(
    "head",
    [
        head_of(url="/embed?a=1"),
        head_of(url="/models/%61/embed"),
        head_of(url="/models/é/embed"),
        head_of(url="/models/a/b/embed"),
        head_of(url="/models//embed"),
        head_of(url="/embed/"),
        head_of(url="http://h/embed"),
        head_of("Connection: close"),
        head_of("Connection: keep-alive, close"),
        head_of("Expect: 100-continue"),
        head_of("Upgrade: h2c"),
        head_of("Transfer-Encoding: chunked"),
        head_of("X-Timeout-Ms: never"),
        head_of("Content-Encoding: gzip"),
        head_of("Content-Length: 5"),
        head_of("Content-Length: 6"),
        head_of("X: a\0b"),
        head_of("X : a"),
        head_of("no colon"),
        head_of().replace(b"POST", b"PUT"),
        head_of().replace(b"1.1", b"1.0"),
        head_of().replace(b"HTTP/1.1", b"HTTP/2.0"),
        head_of().replace(b"Content-Length: 5\r\n", b""),
        head_of().replace(b": 5", b": +5"),
        head_of().replace(b": 5", b": -5"),
        head_of().replace(b": 5", b": 0x5"),
        head_of().replace(b": 5", b": 1_0"),
        head_of().replace(b": 5", b": 5, 5"),
        head_of().replace(b": 5", b":"),
        head_of().replace(b": 5", b":\r\n 5"),
        head_of().replace(b": 5", b": 99999999999999999999999"),
        head_of().replace(b"5\r\n", b"5\n\n{}{}{}"),
        head_of()[:-2],
        b"\n\r\n\r\n",
        b"",
    ],
)
def test_what_is_not_plain_is_left_to_uvicorn(head: bytes) -> None:
    assert parse_head(head) is None


def test_connection_close_without_a_body_is_left_to_uvicorn() -> None:
    assert parse_head(head_of("Connection: close", length=0)) is None


def test_a_fragment_is_left_to_uvicorn() -> None:
    assert parse_head(head_of(url="/models/a#/embed")) is None


@given(
    st.lists(
        st.sampled_from(
            [
                b"\r\n",
                b"\n",
                b"\r",
                b" ",
                b"\t",
                b":",
                b"a",
                b"Content-Length: 3",
                b"0",
                b"\0",
                b"{}",
            ]
        ),
        max_size=8,
    )
)
def test_a_plain_head_ends_where_llhttp_ends_it(pieces: list[bytes]) -> None:
    """Otherwise what is a body to one is a request to the other."""
    raw = b"POST /embed HTTP/1.1\r\nHost: h\r\n" + b"".join(pieces) + b"\r\n\r\n"
    head = raw[: raw.find(b"\r\n\r\n") + 4]
    if (parsed := parse_head(head)) is None:
        return
    bodies: list[bytes] = []

    class Reader:
        def on_body(self, body: bytes) -> None:
            bodies.append(body)

    body = b"x" * parsed.content_length
    httptools.HttpRequestParser(Reader()).feed_data(head + body)
    assert b"".join(bodies) == body


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The heads that were parsed."""
    seen: list[bytes] = []

    def parse(head: bytes) -> Head | None:
        seen.append(head)
        return parse_head(head)

    monkeypatch.setattr(request_heads, "parse_head", parse)
    return seen


@pytest.mark.parametrize("head", [head_of(), head_of(url="/embed?a=1")])
def test_a_head_is_parsed_once(parsed: list[bytes], head: bytes) -> None:
    heads = RequestHeads()
    first = heads.get(head)
    assert all(heads.get(bytes(bytearray(head))) is first for _ in range(10))
    assert parsed == [head]


def test_a_long_head_is_neither_parsed_nor_remembered(parsed: list[bytes]) -> None:
    heads = RequestHeads()
    longest = head_of("X: " + "a" * (HEAD_BYTES_MAX - len(head_of("X: "))))
    assert len(longest) == HEAD_BYTES_MAX
    assert heads.get(longest) is not None
    assert heads.get(longest.replace(b"X: ", b"X: a")) is None
    assert parsed == [longest]
    assert list(heads._heads) == [longest]


def test_no_more_than_so_many_heads_are_remembered(
    parsed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_heads, "HEADS_MAX", 3)
    heads = RequestHeads()
    for length in range(10):
        assert heads.get(head_of(length=length)) == Head("", PLAIN, length)
        assert 1 <= len(heads._heads) <= 3
    assert len(parsed) == 10
