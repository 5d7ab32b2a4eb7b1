"""Tests of header blocks: bombs, lists above the limits, invalid HPACK, and malformed requests."""

import pytest
from hostile import frames as f
from hostile.conftest import MakePeer
from hostile.frames import COMPRESSION_ERROR, ENHANCE_YOUR_CALM
from hostile.peer import Peer

TABLE_BYTES = 4096
HEADER_LIST_BYTES_MAX = 16_384
"""Bytes of a decoded header list, including 32 for each field; the server rejects larger ones."""
RESOURCE_EXHAUSTED = 8
GET = (b":method", b"GET")
SCHEME = (b":scheme", b"http")
PATH = (b":path", b"/health/live")
AUTHORITY = (b":authority", b"test")


def is_usable(peer: Peer, stream: int) -> bool:
    """Checks whether another request on the connection gets its response."""
    peer.send(f.get(stream))
    return peer.response(stream).status == 200 and peer.goaway_code is None


@pytest.mark.parametrize("references", [30, 500, 10_000])
def test_repeated_references_to_a_huge_field_end_the_connection(
    references: int, rest_peer: MakePeer
) -> None:
    """Sends a 4 KB entry of the dynamic table, then references to it of one byte each."""
    peer = rest_peer()
    entry = f.literal(b"x", b"y" * (TABLE_BYTES - 100), 0x40)
    bomb = f.head(b"GET", b"/health/live") + entry + f.integer(62, 7, 0x80) * references
    peer.send(f.headers(1, bomb))
    assert peer.ending() == ENHANCE_YOUR_CALM


def test_header_bomb_over_many_requests_is_rejected_each_time(rest_peer: MakePeer) -> None:
    """Checks that each request stays within the limit that rejects it, and costs no more."""
    peer = rest_peer()
    entry = f.literal(b"x", b"y" * 3900, 0x40)
    peer.send(f.headers(1, f.head(b"GET", b"/health/live") + entry))
    assert peer.response(1).status == 200
    reference = f.integer(62, 7, 0x80)
    for stream in range(3, 803, 2):
        fields = f.head(b"GET", b"/health/live") + reference * 10
        peer.send(f.headers(stream, fields))
        assert peer.response(stream).status == 431
    assert is_usable(peer, 803)


def block_with_list_bytes(nbytes: int) -> bytes:
    """Returns a block of under 5 KB whose header list has ``nbytes`` by RFC 9113's count."""
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
def test_header_list_over_the_limit_is_rejected_with_431(
    over: int, status: int, rest_peer: MakePeer
) -> None:
    """Checks that the request is rejected, and that the connection stays usable."""
    peer = rest_peer()
    peer.send(f.headers(1, block_with_list_bytes(HEADER_LIST_BYTES_MAX + over)))
    assert peer.response(1).status == status
    assert is_usable(peer, 3)


def test_grpc_header_list_over_the_limit_is_resource_exhausted(grpc_peer: MakePeer) -> None:
    peer = grpc_peer()
    entry = f.literal(b"x", b"y" * 3900, 0x40) + f.integer(62, 7, 0x80) * 5
    block = f.grpc_head(b"Embed") + entry
    peer.send(f.headers(1, block, end=False) + f.data(1, f.message(b"")))
    response = peer.response(1)
    assert (response.status, response.grpc_status) == (200, RESOURCE_EXHAUSTED)
    assert is_usable(peer, 3)


def test_thousands_of_one_byte_fields_end_the_connection(rest_peer: MakePeer) -> None:
    """Sends indexes of the static table: 15,000 fields in 15,000 bytes."""
    peer = rest_peer()
    peer.send(f.headers(1, f.head(b"GET", b"/health/live") + f.integer(19, 7, 0x80) * 15_000))
    assert peer.ending() == ENHANCE_YOUR_CALM


@pytest.mark.parametrize("accept", [b";" * 16_000, b"application/json" + b";q=0.0x" * 2_100])
def test_pathological_accept_header_does_not_stall_the_server(
    accept: bytes, rest_peer: MakePeer
) -> None:
    peer = rest_peer()
    for stream in (1, 3, 5):
        block = f.head(b"POST", b"/embed", (b"accept", accept))
        peer.send(f.headers(stream, block, end=False) + f.data(stream, b"{}"))
        assert peer.response(stream).status == 400


GOOD = f.head(b"GET", b"/health/live")


def test_repeated_table_size_updates_are_answered_or_end_the_connection(
    rest_peer: MakePeer,
) -> None:
    """Empties and refills the table 4,000 times in one block; the server may reject that.

    No real client sends such a block.
    """
    peer = rest_peer()
    updates = (f.integer(0, 5, 0x20) + f.integer(4096, 5, 0x20)) * 4000
    peer.send(f.headers(1, updates + GOOD))
    peer.send(f.get(3))
    peer.read_until(lambda: peer.goaway_code is not None or 3 in peer.responses, "answer")
    if peer.goaway_code is None:
        assert peer.response(1).status == 200
        assert peer.response(3).status == 200
    else:
        assert peer.ending() in (COMPRESSION_ERROR, ENHANCE_YOUR_CALM)


def test_cached_header_blocks_hold_little_memory(rest_peer: MakePeer) -> None:
    """Sends on each of 6 connections 64 different blocks of 100 fields, each field one byte."""
    for _ in range(6):
        peer = rest_peer()
        for number in range(64):
            fields = f.head(b"GET", b"/health/live", (b"n", b"%d" % number))
            peer.send(f.headers(2 * number + 1, fields + f.integer(20, 7, 0x80) * 100))
            assert peer.response(2 * number + 1).status == 200


def test_rejected_header_blocks_hold_no_memory(rest_peer: MakePeer) -> None:
    """Sends on each of 12 connections 64 different blocks of 1,385 fields, each field one byte."""
    for _ in range(12):
        peer = rest_peer()
        for number in range(64):
            last = bytes((0x8F + number % 8, 0x8F + number // 8))
            peer.send(f.headers(2 * number + 1, b"\x82\x84\x86" + b"\x8f" * 1380 + last))
        for number in range(64):
            assert peer.response(2 * number + 1).status == 431


def test_requests_with_table_entries_that_evict_each_other_are_answered(
    rest_peer: MakePeer,
) -> None:
    """Sends 100 requests with new entries; the table stays at its 4 KB."""
    peer = rest_peer()
    for number in range(100):
        entries = b"".join(f.literal(b"n%d" % number, b"%d" % i * 300, 0x40) for i in range(10))
        peer.send(f.headers(2 * number + 1, GOOD + entries))
        assert peer.response(2 * number + 1).status == 200
