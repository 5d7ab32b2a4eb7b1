"""Tests of the headers that form a request (RFC 9113, section 8), and of errors for others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedserve.wire.http2.request_headers import read_request
from embedserve.wire.http_stream import Headers, HttpRequest

METHOD, SCHEME, PATH = (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/embed?a=1")
PSEUDO = [METHOD, SCHEME, PATH]


def test_valid_headers_are_parsed_into_a_request() -> None:
    headers = [*PSEUDO, (b":authority", b"h:1"), (b"a", b"b"), (b"content-length", b"12")]
    size = sum(len(name) + len(value) + 32 for name, value in headers)
    assert read_request(headers) == HttpRequest(
        b"POST",
        b"http",
        b"/embed?a=1",
        [(b"a", b"b"), (b"content-length", b"12"), (b"host", b"h:1")],
        size,
        12,
    )


def test_host_header_may_repeat_the_authority() -> None:
    request = read_request([*PSEUDO, (b":authority", b"a:1"), (b"host", b"A:1")])
    assert isinstance(request, HttpRequest)
    assert request.headers == [(b"host", b"A:1")]
    assert request.content_length is None


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        ([(b":authority", b"a"), (b"host", b"b")], "host is not :authority"),
        ([(b":authority", b"a"), (b"host", b"a"), (b"host", b"a")], "host is given twice"),
        ([(b"host", b"a"), (b"host", b"b")], "host is given twice"),
    ],
)
def test_conflicting_or_repeated_host_is_malformed(
    hosts: list[tuple[bytes, bytes]], problem: str
) -> None:
    assert read_request([*PSEUDO, *hosts]) == problem


def test_options_request_accepts_an_asterisk_path() -> None:
    request = read_request([(b":method", b"OPTIONS"), SCHEME, (b":path", b"*")])
    assert isinstance(request, HttpRequest)


def test_repeated_equal_content_length_is_accepted() -> None:
    request = read_request([*PSEUDO, (b"content-length", b"5"), (b"content-length", b"5")])
    assert isinstance(request, HttpRequest)
    assert request.content_length == 5


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ([METHOD, SCHEME], "a pseudo-header is missing"),
        ([METHOD, PATH], "a pseudo-header is missing"),
        ([SCHEME, PATH], "a pseudo-header is missing"),
        ([], "a pseudo-header is missing"),
        ([METHOD, SCHEME, (b":path", b"")], "a pseudo-header is missing"),
        ([METHOD, SCHEME, (b":path", b"*")], ":path does not begin with '/'"),
        ([METHOD, SCHEME, (b":path", b"embed")], ":path does not begin with '/'"),
        ([METHOD, SCHEME, (b":path", b"http://h/")], ":path does not begin with '/'"),
        ([(b":method", b"CONNECT"), (b":authority", b"h")], "a pseudo-header is missing"),
        ([*PSEUDO, METHOD], "a misplaced pseudo-header: :method"),
        ([*PSEUDO, SCHEME], "a misplaced pseudo-header: :scheme"),
        ([*PSEUDO, PATH], "a misplaced pseudo-header: :path"),
        ([*PSEUDO, *[(b":authority", b"h")] * 2], "a misplaced pseudo-header: :authority"),
        ([(b":method", b"GET /"), SCHEME, PATH], "malformed"),
        ([METHOD, SCHEME, (b"a", b"b"), PATH], "a misplaced pseudo-header: :path"),
        ([*PSEUDO, (b":status", b"200")], "a misplaced pseudo-header: :status"),
        ([*PSEUDO, (b":protocol", b"x")], "a misplaced pseudo-header: :protocol"),
        ([*PSEUDO, (b"", b"x")], "a header's name is malformed"),
        ([*PSEUDO, (b"Upper", b"x")], "a header's name is malformed: Upper"),
        ([*PSEUDO, (b"a b", b"x")], "a header's name is malformed"),
        ([*PSEUDO, (b"a:", b"x")], "a header's name is malformed"),
        ([*PSEUDO, (b"a\n", b"x")], "a header's name is malformed"),
        ([*PSEUDO, (b"\xff", b"x")], "a header's name is malformed"),
        ([*PSEUDO, (b"a", b"x\r\ny")], "the value of a is malformed"),
        ([*PSEUDO, (b"a", b"x\n")], "the value of a is malformed"),
        ([*PSEUDO, (b"a", b"x\0")], "the value of a is malformed"),
        ([*PSEUDO, (b"a", b" x")], "the value of a is malformed"),
        ([*PSEUDO, (b"a", b"x\t")], "the value of a is malformed"),
        ([*PSEUDO, (b"connection", b"close")], "connection is not allowed in HTTP/2"),
        ([*PSEUDO, (b"keep-alive", b"5")], "keep-alive is not allowed"),
        ([*PSEUDO, (b"proxy-connection", b"x")], "proxy-connection is not allowed"),
        ([*PSEUDO, (b"transfer-encoding", b"chunked")], "transfer-encoding is not allowed"),
        ([*PSEUDO, (b"upgrade", b"h2c")], "upgrade is not allowed"),
        ([*PSEUDO, (b"te", b"gzip")], "te is not allowed"),
        ([*PSEUDO, (b"te", b"trailers, gzip")], "te is not allowed"),
        ([*PSEUDO, (b"content-length", b"")], "content-length is not a number"),
        ([*PSEUDO, (b"content-length", b"-1")], "content-length is not a number"),
        ([*PSEUDO, (b"content-length", b"+1")], "content-length is not a number"),
        ([*PSEUDO, (b"content-length", b"1_0")], "content-length is not a number"),
        ([*PSEUDO, (b"content-length", b"9" * 20)], "content-length is not a number"),
        ([*PSEUDO, (b"content-length", b"1"), (b"content-length", b"2")], "is given twice"),
    ],
)
def test_malformed_headers_return_an_error_message(headers: Headers, message: str) -> None:
    request = read_request(headers)
    assert isinstance(request, str)
    assert message in request


@pytest.mark.parametrize("value", [b"value\r", b"\nvalue", b"a\x00b", b"value "])
@pytest.mark.parametrize("name", [b":path", b":method", b":scheme", b":authority"])
def test_invalid_pseudo_header_values_are_malformed(name: bytes, value: bytes) -> None:
    """Checks RFC 9113, section 8.2.1, which holds for the values of all fields."""
    headers = dict([*PSEUDO, (b":authority", b"h")])
    headers[name] = b"/" + value if name == b":path" else value
    assert isinstance(read_request(list(headers.items())), str)


@given(st.lists(st.tuples(st.binary(max_size=10), st.binary(max_size=10)), max_size=5))
def test_arbitrary_headers_return_a_request_or_an_error_message(headers: Headers) -> None:
    for one in (headers, [*PSEUDO, *headers]):
        request = read_request(one)
        if isinstance(request, str):
            assert request
        else:
            assert all(b"\n" not in value for _, value in request.headers)
