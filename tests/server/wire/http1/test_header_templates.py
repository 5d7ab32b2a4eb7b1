"""Tests of the HTTP/1 header templates: which headers have a template, and no wrong match."""

import sys
import time

import httptools
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from server.codecs import CODECS, JSON, PROTOBUF
from server.fake_engine import FakeEngine

from embedserve.config import Limits
from embedserve.errors import InvalidRequestError
from embedserve.metrics.metrics import Metrics
from embedserve.metrics.request_metrics import ProtocolMetrics
from embedserve.pipeline import RequestOptions
from embedserve.wire.http1.header_templates import (
    TEMPLATES_MAX,
    TEMPLATES_PER_LENGTH_MAX,
    HeaderTemplate,
    HeaderTemplateCache,
)
from embedserve.wire.http1.request_parser import HEAD_BYTES_MAX

LIMITS = Limits(body_bytes_max=1000, request_text_bytes_max=500)
METRICS: ProtocolMetrics = Metrics([FakeEngine().model]).protocols["rest"]
TOKEN = "Bearer " + "t0k3n" * 400
"""A token of 2 KB."""

ParsedOptions = tuple[str, object, object, float | None]
"""Options parsed from the headers: model, codec, response codec, timeout."""


def headers_of(*lines: str, url: str = "/embed", length: int | str = 5) -> bytes:
    first = f"POST {url} HTTP/1.1"
    return "\r\n".join([first, "Host: h", *lines, f"Content-Length: {length}", "", ""]).encode()


def new_cache() -> HeaderTemplateCache:
    return HeaderTemplateCache(METRICS, LIMITS, CODECS)


def parsed_options(options: RequestOptions) -> ParsedOptions:
    assert options.metrics is METRICS
    return options.model, options.codec, options.response_codec, options.timeout_s


def parse_uncached(headers: bytes) -> tuple[ParsedOptions, int] | None:
    """Parses headers without a cache into options and content length; None if they are not
    plain.
    """
    template = new_cache().parse(headers)
    if template is None:
        return None
    length = template.match(headers, len(headers))
    return None if length < 0 else (parsed_options(template.options_of(headers)), length)


def match_cached(cache: HeaderTemplateCache, headers: bytes) -> tuple[ParsedOptions, int] | None:
    found = cache.match_or_learn(headers, len(headers))
    return None if found is None else (parsed_options(found[0].options_of(headers)), found[1])


@pytest.mark.parametrize(
    ("url", "model"), [("/embed", ""), ("/models/shop/embed", "shop"), ("/models/a.b/embed", "a.b")]
)
def test_model_and_content_length_are_parsed(url: str, model: str) -> None:
    assert parse_uncached(headers_of(url=url, length=12)) == ((model, JSON, JSON, None), 12)


def test_formats_and_timeout_are_parsed_case_insensitively() -> None:
    headers = headers_of("CONTENT-TYPE: Application/X-Protobuf", "accept: */*", "x-timeout-MS: 20")
    assert parse_uncached(headers) == (("", PROTOBUF, PROTOBUF, 0.02), 5)


@pytest.mark.parametrize(
    "headers",
    [
        headers_of(url="/embed?a=1"),
        headers_of(url="/models/%61/embed"),
        headers_of(url="/models/é/embed"),
        headers_of(url="/models/a/b/embed"),
        headers_of(url="/models/a#/embed"),
        headers_of(url="/models//embed"),
        headers_of(url="/embed/"),
        headers_of(url="http://h/embed"),
        headers_of("Connection: close"),
        headers_of("Connection: close", length=0),
        headers_of("Connection: keep-alive, close"),
        headers_of("Expect: 100-continue"),
        headers_of("Upgrade: h2c"),
        headers_of("Transfer-Encoding: chunked"),
        headers_of("X-Timeout-Ms: never"),
        headers_of("X-Timeout-Ms: 5", "X-Timeout-Ms: 5"),
        headers_of("Content-Encoding: gzip"),
        headers_of("Content-Length: 5"),
        headers_of("Content-Length: 6"),
        headers_of("X: a\0b"),
        headers_of("X : a"),
        headers_of("no colon"),
        headers_of().replace(b"POST", b"PUT"),
        headers_of().replace(b"1.1", b"1.0"),
        headers_of().replace(b"HTTP/1.1", b"HTTP/2.0"),
        headers_of().replace(b"Content-Length: 5\r\n", b""),
        headers_of(length="+5"),
        headers_of(length="-5"),
        headers_of(length="0x5"),
        headers_of(length="1_0"),
        headers_of(length="5, 5"),
        headers_of(length=""),
        headers_of(length="\r\n 5"),
        headers_of(length="99999999999999999999999"),
        headers_of().replace(b"5\r\n", b"5\n\n{}{}{}"),
        headers_of()[:-2],
        b"\n\r\n\r\n",
        b"",
    ],
)
def test_headers_that_are_not_plain_have_no_template(headers: bytes) -> None:
    assert parse_uncached(headers) is None
    assert new_cache().match_or_learn(headers, len(headers)) is None


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
def test_headers_end_at_the_same_byte_as_for_llhttp(pieces: list[bytes]) -> None:
    """Checks the end of headers: the body of one parser must not be a request of another."""
    raw = b"POST /embed HTTP/1.1\r\nHost: h\r\n" + b"".join(pieces) + b"\r\n\r\n"
    headers = raw[: raw.find(b"\r\n\r\n") + 4]
    if (found := parse_uncached(headers)) is None:
        return
    bodies: list[bytes] = []

    class Reader:
        def on_body(self, body: bytes) -> None:
            bodies.append(body)

    body = b"x" * found[1]
    httptools.HttpRequestParser(Reader()).feed_data(headers + body)
    assert b"".join(bodies) == body


VARYING = [
    ("X-Request-Id", ["0123456789abcdef", "fedcba9876543210"]),
    ("traceparent", [f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'c' * 32}-{'d' * 16}-00"]),
    ("Authorization", [TOKEN, TOKEN.replace("0", "1")]),
    ("Content-Length", ["48", "93"]),
    ("X-Timeout-Ms", ["50", "75"]),
]


@pytest.mark.parametrize(("name", "values"), VARYING)
def test_template_matches_any_value_of_a_varying_header(name: str, values: list[str]) -> None:
    cache = new_cache()
    text = headers_of(f"{name}: @", "User-Agent: curl/8").decode()
    if name == "Content-Length":
        text = headers_of("User-Agent: curl/8", length="@").decode()
    first, second = (text.replace("@", value).encode() for value in values)
    one, other = cache.match_or_learn(first, len(first)), cache.match_or_learn(second, len(second))
    assert one is not None
    assert other is not None
    assert one[0] is other[0]
    for headers, value in zip((first, second), values, strict=True):
        assert one[0].header(headers, name.lower().encode()) == value.encode()
        assert match_cached(cache, headers) == parse_uncached(headers)


def test_header_lookup_returns_none_for_fixed_and_missing_headers() -> None:
    template = new_cache().parse(headers_of("Accept: */*"))
    assert template is not None
    assert template.header(headers_of("Accept: */*"), b"accept") is None
    assert template.header(headers_of("Accept: */*"), b"traceparent") is None


def test_body_bytes_do_not_affect_the_template_match() -> None:
    cache = new_cache()
    headers = headers_of("X-Request-Id: a")
    for body in (b"12345", b"\r\n\r\n\r", b"POST "):
        found = cache.match_or_learn(headers + body, len(headers))
        assert found is not None
        assert found[1] == 5


def test_timeout_is_parsed_and_validated_on_each_template_match() -> None:
    cache = new_cache()
    assert match_cached(cache, headers_of("X-Timeout-Ms: 2500")) == (("", JSON, JSON, 2.5), 5)
    assert match_cached(cache, headers_of("X-Timeout-Ms: 1000")) == (("", JSON, JSON, 1.0), 5)
    found = cache.match_or_learn(wrong := headers_of("X-Timeout-Ms: soon"), len(wrong))
    assert found is not None
    with pytest.raises(InvalidRequestError, match="X-Timeout-Ms is 'soon'"):
        found[0].options_of(wrong)


SAME_LENGTH = [
    (headers_of("Accept: application/json"), headers_of("Accept: application/nosj")),
    (headers_of("X-A: 1"), headers_of("X-B: 1")),
    (headers_of(url="/models/a/embed"), headers_of(url="/models/b/embed")),
    (headers_of(url="/models/a/embed"), headers_of(url="/models/%/embed")),
    (headers_of("X: 12345678"), headers_of("Expect: 100")),
    (headers_of("X-Request-Id: 1"), headers_of("X-Request-ID: 1")),
    (headers_of("X: abcdefgh"), headers_of("X: a\r\nY: b")),
    (headers_of("X: abcdefghijk"), headers_of("X: a\r\nExpect: ")),
    (headers_of("X: a\r\nExpectt: b"), headers_of("X: aXXXXExpectt: b")),
    (headers_of(length=50), headers_of(length="5,")),
    (headers_of(length=50), headers_of(length="-5")),
    (headers_of(length=50), headers_of(length="+5")),
    (headers_of(length=50), headers_of(length=" 5")),
    (headers_of(length=50), headers_of(length="5 ")),
    (headers_of(length=500), headers_of(length="5\r\n")),
    (headers_of(length=500), headers_of(length="5\n\n")),
    (headers_of("X: abc"), headers_of("X: a\rc")),
    (headers_of("X: abc"), headers_of("X: a\nc")),
    (headers_of("X: abc"), headers_of("X: a\0c")),
    (headers_of("X: abc"), headers_of("X: a\x7fc")),
    (headers_of("X: abc"), headers_of("X:  bc")),
    (headers_of("X: abc"), headers_of("X: ab ")),
    (headers_of("X: " + "a" * 40), headers_of("X: a\r\nTransfer-Encoding: chunked\r\nY: a23")),
    (headers_of("Content-LengthX: 1"), headers_of("Content-Length: 1 ")),
]


@pytest.mark.parametrize(("first", "second"), SAME_LENGTH)
def test_headers_of_equal_length_parse_as_without_a_cache(first: bytes, second: bytes) -> None:
    for one, other in ((first, second), (second, first)):
        cache = new_cache()
        cache.match_or_learn(one, len(one))
        assert match_cached(cache, other) == parse_uncached(other)


NAMES = st.sampled_from(
    ["X-Request-Id", "traceparent", "X", "Accept", "Content-Type", "Expect", "X-Timeout-Ms", "Host"]
)
VALUES = st.text(st.sampled_from("ab1, ;:\t\r\n\0é/"), max_size=12) | st.sampled_from(
    ["application/json", "application/x-protobuf", "50", "gzip", "a\r\nExpect: 100-continue"]
)
HEADER_BYTES = st.builds(
    lambda lines, url, length: headers_of(
        *(f"{name}: {value}" for name, value in lines), url=url, length=length
    ),
    st.lists(st.tuples(NAMES, VALUES), max_size=4),
    st.sampled_from(["/embed", "/models/a/embed", "/models/b/embed", "/embed/"]),
    st.integers(0, 99).map(str) | st.sampled_from(["5 ", "+5", "5\r\nX: a", ""]),
)


def truncate_after_headers(headers: bytes) -> bytes:
    """Cuts the headers after their first empty line, as the connection does."""
    return headers[: headers.find(b"\r\n\r\n") + 4]


@given(HEADER_BYTES, HEADER_BYTES)
def test_random_headers_parse_as_without_a_cache(first: bytes, second: bytes) -> None:
    check_pair(truncate_after_headers(first), truncate_after_headers(second))


@given(
    headers=HEADER_BYTES,
    place=st.integers(0, 400),
    insert=st.binary(min_size=1, max_size=1) | st.sampled_from([b"\r\n", b"\0", b"\x7f", b": "]),
)
def test_slightly_changed_headers_parse_as_without_a_cache(
    headers: bytes, place: int, insert: bytes
) -> None:
    first = truncate_after_headers(headers)
    place = min(place, len(first) - len(insert))
    second = first[:place] + insert + first[place + len(insert) :]
    assume(second.find(b"\r\n\r\n") >= 0)
    check_pair(first, truncate_after_headers(second))


def check_pair(first: bytes, second: bytes) -> None:
    """Checks that neither of ``first`` and ``second`` is taken for the other."""
    for one, other in ((first, second), (second, first)):
        cache = new_cache()
        cache.match_or_learn(one, len(one))
        found = cache.match_or_learn(other, len(other))
        alone = parse_uncached(other)
        if found is None:
            assert alone is None
            continue
        try:
            assert (parsed_options(found[0].options_of(other)), found[1]) == alone
        except InvalidRequestError:  # an invalid timeout; the parser's request is rejected
            assert alone is None


def test_headers_over_the_byte_limit_have_no_template() -> None:
    cache = new_cache()
    longest = headers_of("X: " + "a" * (HEAD_BYTES_MAX - len(headers_of("X: "))))
    assert len(longest) == HEAD_BYTES_MAX
    assert match_cached(cache, longest) == parse_uncached(longest) != None  # noqa: E711
    longer = longest.replace(b"X: ", b"X: a")
    assert cache.match_or_learn(longer, len(longer)) is None


def test_cached_templates_per_length_are_bounded() -> None:
    cache = new_cache()
    learned = [headers_of(f"X-{name}: 1") for name in "abcdefghijklmnopqrst"]
    found = [cache.match_or_learn(headers, len(headers)) for headers in learned]
    kept = found[-TEMPLATES_PER_LENGTH_MAX:]
    again = [cache.match_or_learn(raw, len(raw)) for raw in learned[-TEMPLATES_PER_LENGTH_MAX:]]
    assert [one is not None and one[0] for one in kept] == [
        one is not None and one[0] for one in again
    ]
    first = cache.match_or_learn(learned[0], len(learned[0]))
    assert first is not None
    assert found[0] is not None
    assert first[0] is not found[0][0]  # the template was evicted, and is parsed again
    assert match_cached(cache, learned[0]) == parse_uncached(learned[0])


def test_cached_templates_are_bounded_in_total() -> None:
    cache = new_cache()
    seen: dict[int, HeaderTemplate] = {}
    for count in range(3 * TEMPLATES_MAX):
        headers = headers_of("X-" + "a" * (count // 4) + "bcde"[count % 4] + ": 1")
        found = cache.match_or_learn(headers, len(headers))
        assert found is not None
        seen[id(found[0])] = found[0]
        del found
    # References that a dict, its loop and the call itself hold: fewer since Python 3.14.
    (unused,) = (sys.getrefcount(one) for one in {0: object()}.values())
    alive = sum(sys.getrefcount(template) > unused for template in seen.values())
    assert 0 < alive <= TEMPLATES_MAX


INNER_BLANKS = f"X: a{' ' * 15_000}b"


@pytest.mark.parametrize(
    "line",
    [
        INNER_BLANKS,
        INNER_BLANKS.replace(" ", "\t"),
        INNER_BLANKS[:-1],
        f"X:{' ' * 15_000}b",
        "X:" + ": " * 7_500,
        "X: " + "a " * 7_500,
        "Accept: " + ";" * 15_000,
        "Accept: " + ",;" * 7_500,
        "Accept: " + "; " * 7_500,
        "Accept: ;" + "\t" * 15_000,
        "Accept: application/json" + ";q=0.0x" * 2_100,
        "Accept: application/json;q=0." + "0" * 15_000 + "x",
        "Accept: application/json;q=0" + " " * 15_000 + "x",
    ],
    ids=lambda line: line[:20],
)
def test_long_headers_are_parsed_in_under_half_a_second(line: str) -> None:
    """Checks parsing time: some headers took seconds, on the event loop before authentication."""
    headers = headers_of(line)
    assert len(headers) < HEAD_BYTES_MAX
    start_s = time.thread_time()
    assert parse_uncached(headers) == (("", JSON, JSON, None), 5)
    assert time.thread_time() - start_s < 0.5


def test_whitespace_around_a_header_value_is_stripped() -> None:
    headers = headers_of("X-Request-Id: \t a b \t ", "traceparent:", "Authorization:   ")
    template = new_cache().parse(headers)
    assert template is not None
    assert template.header(headers, b"x-request-id") == b"a b"
    assert (
        template.header(headers, b"traceparent")
        == template.header(headers, b"authorization")
        == b""
    )


@pytest.mark.parametrize(
    ("lines", "bytes_max"), [((), 500), (("Content-Type: application/x-protobuf",), 1000)]
)
def test_template_has_the_body_limit_of_its_codec(lines: tuple[str, ...], bytes_max: int) -> None:
    template = new_cache().parse(headers_of(*lines))
    assert template is not None
    assert template.body_bytes_max == bytes_max
