"""Header blocks: bombs, lists over the limits, what HPACK forbids, and malformed requests."""

from __future__ import annotations

import pytest
from hostile import frames as f
from hostile.conftest import MakePeer
from hostile.frames import COMPRESSION_ERROR, ENHANCE_YOUR_CALM, PROTOCOL_ERROR, REFUSED_STREAM
from hostile.peer import Peer

TABLE_BYTES = 4096
LISTED_BYTES_MAX = 16_384
"""Of a decoded header list, 32 for each field included; above it a request is refused."""
LISTED_BYTES_END = 65_536
"""Above it the connection ends."""
RESOURCE_EXHAUSTED = 8
GET = (b":method", b"GET")
SCHEME = (b":scheme", b"http")
PATH = (b":path", b"/health/live")
AUTHORITY = (b":authority", b"test")


def is_usable(peer: Peer, stream: int) -> bool:
    """Whether the connection answers one more request."""
    peer.send(f.get(stream))
    return peer.answer(stream).status == 200 and peer.goaway_code is None


@pytest.mark.parametrize("references", [30, 500, 10_000])
def test_one_huge_field_many_times(references: int, rest_peer: MakePeer) -> None:
    """A 4 KB entry of the dynamic table, then a byte for each reference to it."""
    peer = rest_peer()
    entry = f.literal(b"x", b"y" * (TABLE_BYTES - 100), 0x40)
    bomb = f.head(b"GET", b"/health/live") + entry + f.integer(62, 7, 0x80) * references
    peer.send(f.headers(1, bomb))
    assert peer.ending() == ENHANCE_YOUR_CALM


def test_a_bomb_built_over_many_requests(rest_peer: MakePeer) -> None:
    """Each request stays within the limit that refuses it, and costs no more than that."""
    peer = rest_peer()
    entry = f.literal(b"x", b"y" * 3900, 0x40)
    peer.send(f.headers(1, f.head(b"GET", b"/health/live") + entry))
    assert peer.answer(1).status == 200
    reference = f.integer(62, 7, 0x80)
    for stream in range(3, 803, 2):
        fields = f.head(b"GET", b"/health/live") + reference * 10
        peer.send(f.headers(stream, fields))
        assert peer.answer(stream).status == 431
    assert is_usable(peer, 803)


def listed(nbytes: int) -> bytes:
    """A block of under 5 KB whose header list is so large by RFC 9113's count."""
    fields = [GET, SCHEME, PATH, AUTHORITY]
    left = nbytes - sum(len(name) + len(value) + 32 for name, value in fields)
    left -= 4 * (1 + 3900 + 32)
    return (
        f.block(fields)
        + f.literal(b"h", b"v" * 3900, 0x40)
        + f.integer(62, 7, 0x80) * 3
        + f.literal(b"r", b"w" * (left - 33))
    )


@pytest.mark.parametrize(("over", "status"), [(0, 200), (1, 431)])
def test_a_header_list_over_the_limit(over: int, status: int, rest_peer: MakePeer) -> None:
    """The request is refused, and the connection goes on."""
    peer = rest_peer()
    peer.send(f.headers(1, listed(LISTED_BYTES_MAX + over)))
    assert peer.answer(1).status == status
    assert is_usable(peer, 3)


def test_a_header_list_over_the_limit_of_a_call(grpc_peer: MakePeer) -> None:
    peer = grpc_peer()
    entry = f.literal(b"x", b"y" * 3900, 0x40) + f.integer(62, 7, 0x80) * 5
    block = f.grpc_head(b"Embed") + entry
    peer.send(f.headers(1, block, end=False) + f.data(1, f.message(b"")))
    answer = peer.answer(1)
    assert (answer.status, answer.grpc_status) == (200, RESOURCE_EXHAUSTED)
    assert is_usable(peer, 3)


def test_a_compressed_block_over_the_limit(rest_peer: MakePeer) -> None:
    peer = rest_peer()
    peer.send(f.headers(1, f.head(b"GET", b"/health/live", (b"x", b"y" * 40_000))))
    assert peer.ending() == ENHANCE_YOUR_CALM


@pytest.mark.parametrize("count", [1000, 2000])
def test_very_many_fields(count: int, rest_peer: MakePeer) -> None:
    """34 bytes each by RFC 9113's count: over one limit, over the other."""
    peer = rest_peer()
    peer.send(f.headers(1, f.head(b"GET", b"/health/live", *[(b"a", b"b")] * count)))
    if 34 * count <= LISTED_BYTES_END:
        assert peer.answer(1).status == 431
        assert is_usable(peer, 3)
    else:
        assert peer.ending() == ENHANCE_YOUR_CALM


def test_fields_of_one_byte(rest_peer: MakePeer) -> None:
    """Indexes of the static table: 15,000 fields in 15,000 bytes."""
    peer = rest_peer()
    peer.send(f.headers(1, f.head(b"GET", b"/health/live") + f.integer(19, 7, 0x80) * 15_000))
    assert peer.ending() == ENHANCE_YOUR_CALM


GOOD = f.head(b"GET", b"/health/live")
COMPRESSION_FAULTS = {
    "index 0": GOOD + b"\x80",
    "index past the tables": GOOD + f.integer(62, 7, 0x80),
    "a far index": GOOD + f.integer(2**31, 7, 0x80),
    "an integer without end": GOOD + b"\xff" + b"\x80" * 10_000,
    "an integer of 70 bits": GOOD + b"\xff" + b"\xff" * 9 + b"\x7f",
    "an integer cut short": GOOD + b"\xff\x80",
    "a length past the block": GOOD + b"\x00\x01a\x7f\xff\xff\xff\x07",
    "a length of 2^63": GOOD + b"\x00\x01a\x7f" + b"\xff" * 9 + b"\x00",
    "a string cut short": GOOD + b"\x00\x01a\x05bb",
    "Huffman's end of string": GOOD + b"\x00\x01a\x84\xff\xff\xff\xff",
    "Huffman padding over 7 bits": GOOD + b"\x00\x01a\x82\xff\xff",
    "Huffman padding of zeros": GOOD + b"\x00\x01a\x81\x00",
    "a table over the limit": f.integer(4097, 5, 0x20) + GOOD,
    "a table far over the limit": f.integer(2**32 - 1, 5, 0x20) + GOOD,
    "a table size after a field": GOOD + f.integer(0, 5, 0x20),
    "garbage": bytes(range(255, 0, -1)) * 8,
}


@pytest.mark.parametrize("name", COMPRESSION_FAULTS)
def test_what_hpack_forbids(name: str, rest_peer: MakePeer) -> None:
    peer = rest_peer()
    peer.send(f.headers(1, COMPRESSION_FAULTS[name]))
    assert peer.ending() == COMPRESSION_ERROR


def test_table_sizes_over_and_over(rest_peer: MakePeer) -> None:
    """Emptied and refilled 4,000 times in one block; a server may refuse what no client sends."""
    peer = rest_peer()
    updates = (f.integer(0, 5, 0x20) + f.integer(4096, 5, 0x20)) * 4000
    peer.send(f.headers(1, updates + GOOD))
    peer.send(f.get(3))
    if peer.goaway_code is None and not peer.is_closed:
        peer.read_for(0.5)
    if peer.goaway_code is None:
        assert peer.answer(1).status == 200
        assert peer.answer(3).status == 200
    else:
        assert peer.ending() in (COMPRESSION_ERROR, ENHANCE_YOUR_CALM)


@pytest.mark.growth(48 << 10)
def test_remembered_blocks_hold_little(rest_peer: MakePeer) -> None:
    """6 connections, each with 64 different blocks of 250 fields that a byte stands for."""
    for _ in range(6):
        peer = rest_peer()
        for number in range(64):
            fields = f.head(b"GET", b"/health/live", (b"n", b"%d" % number))
            peer.send(f.headers(2 * number + 1, fields + f.integer(20, 7, 0x80) * 250))
            assert peer.answer(2 * number + 1).status == 200


def test_entries_that_push_each_other_out(rest_peer: MakePeer) -> None:
    """100 requests of new entries: the table stays at its 4 KB."""
    peer = rest_peer()
    for number in range(100):
        entries = b"".join(f.literal(b"n%d" % number, b"%d" % i * 300, 0x40) for i in range(10))
        peer.send(f.headers(2 * number + 1, GOOD + entries))
        assert peer.answer(2 * number + 1).status == 200


MALFORMED = {
    "upper case": [GET, SCHEME, PATH, AUTHORITY, (b"X-Test", b"a")],
    "no method": [SCHEME, PATH, AUTHORITY],
    "no scheme": [GET, PATH, AUTHORITY],
    "no path": [GET, SCHEME, AUTHORITY],
    "empty path": [GET, SCHEME, (b":path", b""), AUTHORITY],
    "two methods": [GET, GET, SCHEME, PATH, AUTHORITY],
    "two schemes": [GET, SCHEME, SCHEME, PATH, AUTHORITY],
    "two paths": [GET, SCHEME, PATH, PATH, AUTHORITY],
    "two authorities": [GET, SCHEME, PATH, AUTHORITY, AUTHORITY],
    "unknown pseudo header": [GET, SCHEME, PATH, AUTHORITY, (b":test", b"a")],
    "a status": [GET, SCHEME, PATH, AUTHORITY, (b":status", b"200")],
    "pseudo header after a field": [GET, SCHEME, AUTHORITY, (b"a", b"b"), PATH],
    "connection": [GET, SCHEME, PATH, AUTHORITY, (b"connection", b"close")],
    "keep-alive": [GET, SCHEME, PATH, AUTHORITY, (b"keep-alive", b"5")],
    "proxy-connection": [GET, SCHEME, PATH, AUTHORITY, (b"proxy-connection", b"close")],
    "transfer-encoding": [GET, SCHEME, PATH, AUTHORITY, (b"transfer-encoding", b"chunked")],
    "upgrade": [GET, SCHEME, PATH, AUTHORITY, (b"upgrade", b"h2c")],
    "te": [GET, SCHEME, PATH, AUTHORITY, (b"te", b"gzip")],
    "te with more": [GET, SCHEME, PATH, AUTHORITY, (b"te", b"trailers, gzip")],
    "a line end in the path": [GET, SCHEME, (b":path", b"/health/live\r\na: b"), AUTHORITY],
    "a zero in the path": [GET, SCHEME, (b":path", b"/health/live\0"), AUTHORITY],
    "a line end in the authority": [GET, SCHEME, PATH, (b":authority", b"a\r\nb: c")],
    "a line end in the method": [(b":method", b"GET\r\n"), SCHEME, PATH, AUTHORITY],
    "a space in the method": [(b":method", b"GET /"), SCHEME, PATH, AUTHORITY],
    "a line end in the scheme": [GET, (b":scheme", b"ht\ntp"), PATH, AUTHORITY],
    "a line end in a value": [GET, SCHEME, PATH, AUTHORITY, (b"a", b"b\r\nc: d")],
    "a zero in a value": [GET, SCHEME, PATH, AUTHORITY, (b"a", b"b\0c")],
    "a space in a name": [GET, SCHEME, PATH, AUTHORITY, (b"a b", b"c")],
    "a colon in a name": [GET, SCHEME, PATH, AUTHORITY, (b"a:b", b"c")],
    "an empty name": [GET, SCHEME, PATH, AUTHORITY, (b"", b"c")],
    "a negative content-length": [GET, SCHEME, PATH, AUTHORITY, (b"content-length", b"-1")],
    "content-lengths that differ": [
        GET,
        SCHEME,
        PATH,
        AUTHORITY,
        (b"content-length", b"0"),
        (b"content-length", b"1"),
    ],
    "a body promised": [GET, SCHEME, PATH, AUTHORITY, (b"content-length", b"7")],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests(name: str, rest_peer: MakePeer) -> None:
    """The stream is reset or its request refused; the connection goes on."""
    peer = rest_peer()
    peer.send(f.headers(1, f.block(MALFORMED[name])))
    answer = peer.answer(1)
    assert answer.reset_code == PROTOCOL_ERROR or answer.status in (400, 405)
    assert is_usable(peer, 3)


@pytest.mark.parametrize("promised", [3, 5])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_a_content_length_that_lies(promised: int, splits: int, rest_peer: MakePeer) -> None:
    peer = rest_peer()
    length = (b"content-length", b"%d" % promised)
    peer.send(f.headers(1, f.head(b"POST", b"/embed", length), end=False))
    body = b"{} x"
    parts = [body[i : i + 4 // splits] for i in range(0, 4, 4 // splits)]
    for i, part in enumerate(parts):
        peer.send(f.data(1, part, end=i == len(parts) - 1))
    answer = peer.answer(1)
    assert answer.reset_code == PROTOCOL_ERROR or answer.status == 400
    assert is_usable(peer, 3)


def test_trailers_that_are_no_end(rest_peer: MakePeer) -> None:
    """A second HEADERS without END_STREAM is malformed."""
    peer = rest_peer()
    opened = f.headers(1, f.head(b"POST", b"/embed"), end=False)
    peer.send(opened + f.headers(1, f.block([(b"a", b"b")]), end=False))
    assert peer.answer(1).reset_code == PROTOCOL_ERROR
    assert is_usable(peer, 3)


def test_trailers_with_a_pseudo_header(rest_peer: MakePeer) -> None:
    peer = rest_peer()
    opened = f.headers(1, f.head(b"POST", b"/embed"), end=False)
    peer.send(opened + f.headers(1, f.block([PATH])))
    answer = peer.answer(1)
    assert answer.reset_code == PROTOCOL_ERROR or answer.status == 400
    assert is_usable(peer, 3)


def test_trailers_over_the_limit(rest_peer: MakePeer) -> None:
    """They count as any header list does."""
    peer = rest_peer()
    opened = f.headers(1, f.head(b"POST", b"/embed"), end=False)
    trailers = f.literal(b"x", b"y" * 3900, 0x40) + f.integer(62, 7, 0x80) * 40
    peer.send(opened + f.headers(1, trailers))
    assert peer.ending() == ENHANCE_YOUR_CALM


def test_connect_opens_no_tunnel(rest_peer: MakePeer) -> None:
    peer = rest_peer()
    peer.send(f.headers(1, f.block([(b":method", b"CONNECT"), AUTHORITY]), end=False))
    answer = peer.answer(1)
    assert answer.reset_code in (PROTOCOL_ERROR, REFUSED_STREAM) or 400 <= answer.status < 600
    assert is_usable(peer, 3)
