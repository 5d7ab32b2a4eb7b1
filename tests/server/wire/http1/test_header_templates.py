"""Tests of the HTTP/1 header templates: which headers have a template, and no wrong match."""

from __future__ import annotations

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
from embedserve.metrics.metrics import Metrics, ProtocolMetrics
from embedserve.pipeline import RequestOptions
from embedserve.wire.http1.header_checks import HEAD_BYTES_MAX
from embedserve.wire.http1.header_templates import (
    TEMPLATES_MAX,
    TEMPLATES_PER_LENGTH_MAX,
    HeaderTemplate,
    HeaderTemplateCache,
    parse_head,
)

LIMITS = Limits(body_bytes_max=1000, request_text_bytes_max=500)
METRICS: ProtocolMetrics = Metrics([FakeEngine().model]).protocols["rest"]
TOKEN = "Bearer " + "t0k3n" * 400
"""A token of 2 KB."""

What = tuple[str, object, object, float | None]
"""Options parsed from the headers: model, codec, response codec, timeout."""


def head_of(*lines: str, url: str = "/embed", length: int | str = 5) -> bytes:
    first = f"POST {url} HTTP/1.1"
    return "\r\n".join([first, "Host: h", *lines, f"Content-Length: {length}", "", ""]).encode()


def what(options: RequestOptions) -> What:
    assert options.metrics is METRICS
    return options.model, options.codec, options.response_codec, options.timeout_s


def parsed(head: bytes) -> tuple[What, int] | None:
    """Parses headers without a cache into options and content length; None if they are not
    plain.
    """
    form = parse_head(head, METRICS, LIMITS, CODECS)
    if form is None:
        return None
    length = form.content_length(head, len(head))
    return None if length < 0 else (what(form.options_of(head)), length)


def matched(forms: HeaderTemplateCache, head: bytes) -> tuple[What, int] | None:
    found = forms.match_or_learn(head, len(head))
    return None if found is None else (what(found[0].options_of(head)), found[1])


@pytest.mark.parametrize(
    ("url", "model"), [("/embed", ""), ("/models/shop/embed", "shop"), ("/models/a.b/embed", "a.b")]
)
def test_a_plain_head_names_its_model_and_length(url: str, model: str) -> None:
    assert parsed(head_of(url=url, length=12)) == ((model, JSON, JSON, None), 12)


def test_a_head_says_the_formats_and_the_timeout_in_any_case() -> None:
    head = head_of("CONTENT-TYPE: Application/X-Protobuf", "accept: */*", "x-timeout-MS: 20")
    assert parsed(head) == (("", PROTOBUF, PROTOBUF, 0.02), 5)


@pytest.mark.parametrize(
    "head",
    [
        head_of(url="/embed?a=1"),
        head_of(url="/models/%61/embed"),
        head_of(url="/models/é/embed"),
        head_of(url="/models/a/b/embed"),
        head_of(url="/models/a#/embed"),
        head_of(url="/models//embed"),
        head_of(url="/embed/"),
        head_of(url="http://h/embed"),
        head_of("Connection: close"),
        head_of("Connection: close", length=0),
        head_of("Connection: keep-alive, close"),
        head_of("Expect: 100-continue"),
        head_of("Upgrade: h2c"),
        head_of("Transfer-Encoding: chunked"),
        head_of("X-Timeout-Ms: never"),
        head_of("X-Timeout-Ms: 5", "X-Timeout-Ms: 5"),
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
        head_of(length="+5"),
        head_of(length="-5"),
        head_of(length="0x5"),
        head_of(length="1_0"),
        head_of(length="5, 5"),
        head_of(length=""),
        head_of(length="\r\n 5"),
        head_of(length="99999999999999999999999"),
        head_of().replace(b"5\r\n", b"5\n\n{}{}{}"),
        head_of()[:-2],
        b"\n\r\n\r\n",
        b"",
    ],
)
def test_headers_that_are_not_plain_have_no_template(head: bytes) -> None:
    assert parsed(head) is None
    assert HeaderTemplateCache(METRICS, LIMITS, CODECS).match_or_learn(head, len(head)) is None


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
    """Checks the end of headers: the body of one parser must not be a request of another."""
    raw = b"POST /embed HTTP/1.1\r\nHost: h\r\n" + b"".join(pieces) + b"\r\n\r\n"
    head = raw[: raw.find(b"\r\n\r\n") + 4]
    if (found := parsed(head)) is None:
        return
    bodies: list[bytes] = []

    class Reader:
        def on_body(self, body: bytes) -> None:
            bodies.append(body)

    body = b"x" * found[1]
    httptools.HttpRequestParser(Reader()).feed_data(head + body)
    assert b"".join(bodies) == body


VARYING = [
    ("X-Request-Id", ["0123456789abcdef", "fedcba9876543210"]),
    ("traceparent", [f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'c' * 32}-{'d' * 16}-00"]),
    ("Authorization", [TOKEN, TOKEN.replace("0", "1")]),
    ("Content-Length", ["48", "93"]),
    ("X-Timeout-Ms", ["50", "75"]),
]


@pytest.mark.parametrize(("name", "values"), VARYING)
def test_a_form_is_matched_whatever_stands_in_its_gaps(name: str, values: list[str]) -> None:
    forms = HeaderTemplateCache(METRICS, LIMITS, CODECS)
    template = head_of(f"{name}: @", "User-Agent: curl/8").decode()
    if name == "Content-Length":
        template = head_of("User-Agent: curl/8", length="@").decode()
    first, second = (template.replace("@", value).encode() for value in values)
    one, other = forms.match_or_learn(first, len(first)), forms.match_or_learn(second, len(second))
    assert one is not None
    assert other is not None
    assert one[0] is other[0]
    for head, value in zip((first, second), values, strict=True):
        assert one[0].header(head, name.lower().encode()) == value.encode()
        assert matched(forms, head) == parsed(head)


def test_a_header_that_no_gap_holds_is_not_found() -> None:
    form = parse_head(head_of("Accept: */*"), METRICS, LIMITS, CODECS)
    assert form is not None
    assert form.header(head_of("Accept: */*"), b"accept") is None
    assert form.header(head_of("Accept: */*"), b"traceparent") is None


def test_a_body_behind_the_head_is_not_looked_at() -> None:
    forms = HeaderTemplateCache(METRICS, LIMITS, CODECS)
    head = head_of("X-Request-Id: a")
    for body in (b"12345", b"\r\n\r\n\r", b"POST "):
        found = forms.match_or_learn(head + body, len(head))
        assert found is not None
        assert found[1] == 5


def test_a_timeout_in_a_known_form_is_read_anew_and_refused_where_it_is_none() -> None:
    forms = HeaderTemplateCache(METRICS, LIMITS, CODECS)
    assert matched(forms, head_of("X-Timeout-Ms: 2500")) == (("", JSON, JSON, 2.5), 5)
    assert matched(forms, head_of("X-Timeout-Ms: 1000")) == (("", JSON, JSON, 1.0), 5)
    found = forms.match_or_learn(wrong := head_of("X-Timeout-Ms: soon"), len(wrong))
    assert found is not None
    with pytest.raises(InvalidRequestError, match="X-Timeout-Ms is 'soon'"):
        found[0].options_of(wrong)


SAME_LENGTH = [
    (head_of("Accept: application/json"), head_of("Accept: application/nosj")),
    (head_of("X-A: 1"), head_of("X-B: 1")),
    (head_of(url="/models/a/embed"), head_of(url="/models/b/embed")),
    (head_of(url="/models/a/embed"), head_of(url="/models/%/embed")),
    (head_of("X: 12345678"), head_of("Expect: 100")),
    (head_of("X-Request-Id: 1"), head_of("X-Request-ID: 1")),
    (head_of("X: abcdefgh"), head_of("X: a\r\nY: b")),
    (head_of("X: abcdefghijk"), head_of("X: a\r\nExpect: ")),
    (head_of("X: a\r\nExpectt: b"), head_of("X: aXXXXExpectt: b")),
    (head_of(length=50), head_of(length="5,")),
    (head_of(length=50), head_of(length="-5")),
    (head_of(length=50), head_of(length="+5")),
    (head_of(length=50), head_of(length=" 5")),
    (head_of(length=50), head_of(length="5 ")),
    (head_of(length=500), head_of(length="5\r\n")),
    (head_of(length=500), head_of(length="5\n\n")),
    (head_of("X: abc"), head_of("X: a\rc")),
    (head_of("X: abc"), head_of("X: a\nc")),
    (head_of("X: abc"), head_of("X: a\0c")),
    (head_of("X: abc"), head_of("X: a\x7fc")),
    (head_of("X: abc"), head_of("X:  bc")),
    (head_of("X: abc"), head_of("X: ab ")),
    (head_of("X: " + "a" * 40), head_of("X: a\r\nTransfer-Encoding: chunked\r\nY: a23")),
    (head_of("Content-LengthX: 1"), head_of("Content-Length: 1 ")),
]


@pytest.mark.parametrize(("first", "second"), SAME_LENGTH)
def test_a_head_of_the_same_length_is_not_taken_for_another(first: bytes, second: bytes) -> None:
    for one, other in ((first, second), (second, first)):
        forms = HeaderTemplateCache(METRICS, LIMITS, CODECS)
        forms.match_or_learn(one, len(one))
        assert matched(forms, other) == parsed(other)


NAMES = st.sampled_from(
    ["X-Request-Id", "traceparent", "X", "Accept", "Content-Type", "Expect", "X-Timeout-Ms", "Host"]
)
VALUES = st.text(st.sampled_from("ab1, ;:\t\r\n\0é/"), max_size=12) | st.sampled_from(
    ["application/json", "application/x-protobuf", "50", "gzip", "a\r\nExpect: 100-continue"]
)
HEADS = st.builds(
    lambda lines, url, length: head_of(
        *(f"{name}: {value}" for name, value in lines), url=url, length=length
    ),
    st.lists(st.tuples(NAMES, VALUES), max_size=4),
    st.sampled_from(["/embed", "/models/a/embed", "/models/b/embed", "/embed/"]),
    st.integers(0, 99).map(str) | st.sampled_from(["5 ", "+5", "5\r\nX: a", ""]),
)


def whole(head: bytes) -> bytes:
    """Cuts the headers after their first empty line, as the connection does."""
    return head[: head.find(b"\r\n\r\n") + 4]


@given(HEADS, HEADS)
def test_a_match_is_what_the_head_alone_is(first: bytes, second: bytes) -> None:
    check(whole(first), whole(second))


@given(
    head=HEADS,
    place=st.integers(0, 400),
    insert=st.binary(min_size=1, max_size=1) | st.sampled_from([b"\r\n", b"\0", b"\x7f", b": "]),
)
def test_a_head_that_differs_in_a_byte_is_what_it_alone_is(
    head: bytes, place: int, insert: bytes
) -> None:
    first = whole(head)
    place = min(place, len(first) - len(insert))
    second = first[:place] + insert + first[place + len(insert) :]
    assume(second.find(b"\r\n\r\n") >= 0)
    check(first, whole(second))


def check(first: bytes, second: bytes) -> None:
    """Checks that neither of ``first`` and ``second`` is taken for the other."""
    for one, other in ((first, second), (second, first)):
        forms = HeaderTemplateCache(METRICS, LIMITS, CODECS)
        forms.match_or_learn(one, len(one))
        found = forms.match_or_learn(other, len(other))
        alone = parsed(other)
        if found is None:
            assert alone is None
            continue
        try:
            assert (what(found[0].options_of(other)), found[1]) == alone
        except InvalidRequestError:  # an invalid timeout; the parser's request is rejected
            assert alone is None


def test_a_long_head_is_not_remembered() -> None:
    forms = HeaderTemplateCache(METRICS, LIMITS, CODECS)
    longest = head_of("X: " + "a" * (HEAD_BYTES_MAX - len(head_of("X: "))))
    assert len(longest) == HEAD_BYTES_MAX
    assert matched(forms, longest) == parsed(longest) != None  # noqa: E711
    longer = longest.replace(b"X: ", b"X: a")
    assert forms.match_or_learn(longer, len(longer)) is None


def test_no_more_than_so_many_forms_of_a_length_are_remembered() -> None:
    forms = HeaderTemplateCache(METRICS, LIMITS, CODECS)
    heads = [head_of(f"X-{name}: 1") for name in "abcdefghijklmnopqrst"]
    found = [forms.match_or_learn(head, len(head)) for head in heads]
    kept = found[-TEMPLATES_PER_LENGTH_MAX:]
    again = [forms.match_or_learn(head, len(head)) for head in heads[-TEMPLATES_PER_LENGTH_MAX:]]
    assert [one is not None and one[0] for one in kept] == [
        one is not None and one[0] for one in again
    ]
    first = forms.match_or_learn(heads[0], len(heads[0]))
    assert first is not None
    assert found[0] is not None
    assert first[0] is not found[0][0]  # the template was evicted, and is parsed again
    assert matched(forms, heads[0]) == parsed(heads[0])


def test_what_is_remembered_of_all_heads_is_bounded() -> None:
    forms = HeaderTemplateCache(METRICS, LIMITS, CODECS)
    seen: dict[int, HeaderTemplate] = {}
    for count in range(3 * TEMPLATES_MAX):
        head = head_of("X-" + "a" * (count // 4) + "bcde"[count % 4] + ": 1")
        found = forms.match_or_learn(head, len(head))
        assert found is not None
        seen[id(found[0])] = found[0]
        del found
    alive = sum(sys.getrefcount(form) > SEEN_REFERENCES for form in seen.values())
    assert 0 < alive <= TEMPLATES_MAX


SEEN_REFERENCES = 3
"""References to a template that only ``seen``, the loop and the call itself hold."""


BLANKS_WITHIN = f"X: a{' ' * 15_000}b"


@pytest.mark.parametrize(
    "line",
    [
        BLANKS_WITHIN,
        BLANKS_WITHIN.replace(" ", "\t"),
        BLANKS_WITHIN[:-1],
        f"X:{' ' * 15_000}b",
        "X:" + ": " * 7_500,
        "X: " + "a " * 7_500,
        "Accept: " + ";" * 15_000,
        "Accept: " + ",;" * 7_500,
        "Accept: " + "; " * 7_500,
        "Accept: ;" + "\t" * 15_000,
        "Accept: " + ";q=0.0x" * 2_100,
        "Accept: a;q=0." + "0" * 15_000 + "x",
        "Accept: a;q=0" + " " * 15_000 + "x",
    ],
    ids=lambda line: line[:20],
)
def test_a_long_head_is_read_within_a_moment(line: str) -> None:
    """Checks parsing time: some headers took seconds, on the event loop before authentication."""
    head = head_of(line)
    assert len(head) < HEAD_BYTES_MAX
    start_s = time.thread_time()
    assert parsed(head) == (("", JSON, JSON, None), 5)
    assert time.thread_time() - start_s < 0.5


def test_blanks_around_a_value_are_no_part_of_it() -> None:
    head = head_of("X-Request-Id: \t a b \t ", "traceparent:", "Authorization:   ")
    form = parse_head(head, METRICS, LIMITS, CODECS)
    assert form is not None
    assert form.header(head, b"x-request-id") == b"a b"
    assert form.header(head, b"traceparent") == form.header(head, b"authorization") == b""


@pytest.mark.parametrize(
    ("lines", "bytes_max"), [((), 500), (("Content-Type: application/x-protobuf",), 1000)]
)
def test_a_form_knows_how_long_the_body_of_its_codec_may_be(
    lines: tuple[str, ...], bytes_max: int
) -> None:
    form = parse_head(head_of(*lines), METRICS, LIMITS, CODECS)
    assert form is not None
    assert form.body_bytes_max == bytes_max
