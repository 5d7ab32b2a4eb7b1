"""Tests of HPACK: blocks are cached while their meaning stays; any decoder reads our blocks."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder
from hpack.struct import NeverIndexedHeaderTuple
from hypothesis import given
from hypothesis import strategies as st

from embedserve.shard_client.call_headers import CallHeaders
from embedserve.wire.http2.control import HEADER_LIST_BYTES_MAX
from embedserve.wire.http2.frames import ErrorCode, ProtocolViolation
from embedserve.wire.http2.header_blocks import (
    BLOCK_BYTES_MAX,
    BLOCKS_MAX,
    CACHED_BYTES_MAX,
    HEADER_BYTES,
    LIST_BYTES_MAX,
    HeaderBlocks,
    encode,
)
from embedserve.wire.http_stream import Headers

GET: Headers = [(b":method", b"GET"), (b":path", b"/")]


class Understood:
    """Counts the blocks that were parsed."""

    def __init__(self) -> None:
        self.seen: list[Headers] = []
        self.blocks: HeaderBlocks[Headers] = HeaderBlocks(self._understand)

    def _understand(self, headers: Headers) -> Headers:
        self.seen.append(headers)
        return headers

    def read(self, block: bytes) -> Headers:
        return self.blocks.read(block)


def literal(name: bytes, value: bytes, *, first: int) -> bytes:
    """Returns a literal field; ``first`` decides whether it enters the table (RFC 7541, 6.2)."""
    assert len(name) < 127 > len(value)
    return bytes((first, len(name))) + name + bytes((len(value),)) + value


ADDS = 0x40
"""First byte of a literal with incremental indexing, which changes the table."""
NOT = 0x00
NEWEST = b"\xbe"
"""Index of the dynamic table's newest entry (62)."""


def test_a_block_that_changes_nothing_is_understood_once() -> None:
    one = Understood()
    block = literal(b"x", b"1", first=NOT)
    assert block not in one.blocks.known
    for _ in range(5):
        assert one.read(block) == [(b"x", b"1")]
    assert block in one.blocks.known
    assert len(one.seen) == 1


def test_a_client_that_sends_the_same_headers_is_understood_once_its_table_has_them() -> None:
    one, encoder = Understood(), Encoder()
    headers = [*GET, (b"user-agent", b"grpc-python/1.70"), (b"te", b"trailers")]
    for _ in range(10):
        assert one.read(encoder.encode(headers)) == headers
    assert len(one.seen) == 2


def test_a_block_that_changes_the_table_is_not_remembered() -> None:
    one = Understood()
    block = literal(b"x", b"1", first=ADDS)
    for _ in range(3):
        one.read(block)
    assert len(one.seen) == 3
    assert block not in one.blocks.known


@pytest.mark.parametrize("how", ["read", "decode"])
def test_what_was_remembered_is_forgotten_when_the_table_changes(how: str) -> None:
    """Checks that the cache is cleared, since the block now means something else. Trailers,
    which are only decoded, change the table, too.
    """
    one = Understood()
    one.read(literal(b"x", b"1", first=ADDS))
    assert [one.read(NEWEST) for _ in range(2)] == [[(b"x", b"1")]] * 2
    assert NEWEST in one.blocks.known
    change = literal(b"x", b"2", first=ADDS)
    if how == "read":
        one.read(change)
    else:
        assert one.blocks.decode(change) == [(b"x", b"2")]
    assert NEWEST not in one.blocks.known
    assert one.read(NEWEST) == [(b"x", b"2")]


def test_a_table_that_is_full_and_changes_is_noticed() -> None:
    """Checks a full table, whose length stays constant: each new entry evicts another."""
    one = Understood()
    value = b"v" * 100
    for i in range(60):
        one.read(literal(b"x", value + b"%d" % (i % 10), first=ADDS))
    before = one.read(NEWEST)
    assert NEWEST in one.blocks.known
    one.read(literal(b"x", value + b"0", first=ADDS))
    assert NEWEST not in one.blocks.known
    assert one.read(NEWEST) == [(b"x", value + b"0")] != before


@pytest.mark.parametrize("size", [b"\x20", b"\x3f\x09"])
def test_a_table_that_is_made_smaller_is_noticed(size: bytes) -> None:
    one = Understood()
    one.read(literal(b"x", b"1", first=ADDS))
    one.read(NEWEST)
    assert one.read(size + literal(b"y", b"2", first=NOT)) == [(b"y", b"2")]
    assert NEWEST not in one.blocks.known


def test_trailers_that_change_nothing_forget_nothing() -> None:
    one = Understood()
    block = literal(b"x", b"1", first=NOT)
    one.read(block)
    assert one.blocks.decode(literal(b"y", b"2", first=NOT)) == [(b"y", b"2")]
    assert block in one.blocks.known


def held_bytes(block: bytes, headers: Headers) -> int:
    return len(block) + sum(len(name) + len(value) + HEADER_BYTES for name, value in headers)


@pytest.mark.parametrize("over", [0, 1])
def test_large_blocks_are_not_remembered(over: int) -> None:
    one = Understood()
    headers = [(b"x", b""), (b"y", b"v" * 1000)]
    more = BLOCK_BYTES_MAX - held_bytes(encode(headers), headers)
    headers[1] = (b"y" + b"y" * (more % 2), b"v" * (1000 + more // 2 + over))
    block = encode(headers)
    assert held_bytes(block, headers) - BLOCK_BYTES_MAX in (2 * over, 2 * over + 1)
    one.read(block)
    assert (block in one.blocks.known) == (not over)


@pytest.mark.parametrize("count", [125, 300, 1385])
def test_blocks_of_many_small_headers_are_not_remembered(count: int) -> None:
    """Sends headers of the static table without values, one byte each."""
    one = Understood()
    block = b"\x82\x84\x86" + b"\x8f" * count
    assert len(one.read(block)) == 3 + count
    assert (one.blocks.known, one.blocks.cached_bytes) == ({}, 0)


def test_lists_that_are_rejected_for_their_size_are_not_remembered() -> None:
    """Sends a list whose headers are table entries of one byte each."""
    one = Understood()
    one.read(literal(b"x" * 100, b"v" * 100, first=ADDS))
    count = HEADER_LIST_BYTES_MAX // (200 + 32) + 1
    assert len(one.read(NEWEST * count)) == count
    assert one.blocks.known == {}


def test_what_is_remembered_is_bounded_in_bytes() -> None:
    one = Understood()
    for i in range(3 * BLOCKS_MAX):
        block = b"\x8f" * 60 + literal(b"x", b"%d" % i, first=NOT)
        one.read(block)
        assert block in one.blocks.known
        held = sum(held_bytes(*known) for known in one.blocks.known.items())
        assert held == one.blocks.cached_bytes <= CACHED_BYTES_MAX
    assert len(one.blocks.known) < BLOCKS_MAX
    one.read(literal(b"y", b"1", first=ADDS))
    assert (one.blocks.known, one.blocks.cached_bytes) == ({}, 0)


def test_the_blocks_of_routers_and_of_clients_with_tokens_and_traces_are_remembered() -> None:
    routers, clients = Understood(), Understood()
    token = (b"authorization", b"Bearer es_" + b"t" * 43)
    path = "/inference.GRPCInferenceService/ModelInfer"
    calls = CallHeaders("embedserve-part-10.embedserve:9000", path, metadata=[token])
    for i in range(BLOCKS_MAX):
        routers.read(calls.block(1e-4 * 1.2**i))
    assert len(routers.blocks.known) == BLOCKS_MAX
    more = [(b"user-agent", b"grpc-python/1.70.0 grpc-c/45.0.0 (linux; chttp2)")]
    more += [(b"accept-encoding", b"gzip"), (b"grpc-accept-encoding", b"identity, deflate, gzip")]
    for i in range(48):
        traced = (b"traceparent", b"00-%032x-%016x-01" % (i, i))
        clients.read(calls.block(1.0) + encode([*more, traced]))
    assert len(clients.blocks.known) == 48


def test_no_more_than_so_many_blocks_are_remembered() -> None:
    one = Understood()
    blocks = [literal(b"x", b"%d" % i, first=NOT) for i in range(5 * BLOCKS_MAX)]
    for block in blocks:
        one.read(block)
        assert sum(block in one.blocks.known for block in blocks) <= BLOCKS_MAX
    assert blocks[-1] in one.blocks.known


def test_what_cannot_be_understood_is_not_remembered_and_harms_no_other() -> None:
    def refuse(headers: Headers) -> Headers:
        if headers[0][0] == b"bad":
            raise ValueError("bad")
        return headers

    blocks: HeaderBlocks[Headers] = HeaderBlocks(refuse)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            blocks.read(literal(b"bad", b"1", first=ADDS))
    assert blocks.read(NEWEST.replace(b"\xbe", b"\x82")) == [(b":method", b"GET")]


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",
        b"\xbe",
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x00\x05ab",
        b"\x00\x81\xff",
        b"\x82\x3f\xe1\x1f",
        b"\x3f\xe1\xff\xff\xff\x0f",
        b"\x40",
        b"\xff\x80\xff\xff\xff\x07",  # a far index
        b"\xff" + b"\x80" * 10_000,  # an integer without end
        b"\xff\x80",  # an integer cut short
        b"\x00\x01a\x7f\xff\xff\xff\x07",  # a length past the block
        b"\x00\x01a\x7f" + b"\xff" * 9 + b"\x00",  # a length of 2^63
        b"\x00\x01a\x84\xff\xff\xff\xff",  # Huffman's end of string
        b"\x00\x01a\x82\xff\xff",  # Huffman padding over 7 bits
        b"\x00\x01a\x81\x00",  # Huffman padding of zeros
        b"\x82\x20",  # a table size after a field
        b"\x3f\xe2\x1f\x82",  # a table over the limit
        bytes(range(255, 0, -1)) * 8,
    ],
)
def test_what_cannot_be_decoded_ends_the_connection(block: bytes) -> None:
    with pytest.raises(ProtocolViolation) as caught:
        Understood().read(block)
    assert caught.value.code is ErrorCode.COMPRESSION_ERROR


@given(st.binary(max_size=60))
def test_garbage_is_headers_or_an_end_of_the_connection(block: bytes) -> None:
    code = None
    headers: Headers = []
    try:
        headers = Understood().read(block)
    except ProtocolViolation as error:
        code = error.code
    assert code in (None, ErrorCode.COMPRESSION_ERROR, ErrorCode.ENHANCE_YOUR_CALM)
    assert all(isinstance(one, bytes) for header in headers for one in header)


@pytest.mark.parametrize("update", [b"\x20", b"\x3f\xe1\x1f", b"\x3f\x00"])
def test_the_tables_size_is_updated_twice_in_a_block_at_most(update: bytes) -> None:
    assert Understood().read(2 * update + encode(GET)) == GET
    with pytest.raises(ProtocolViolation, match="over 2 updates") as raised:
        Understood().read(3 * update + encode(GET))
    assert raised.value.code == ErrorCode.COMPRESSION_ERROR


def test_a_list_that_is_too_large_decoded_ends_the_connection() -> None:
    one = Understood()
    value = b"v" * 3000
    one.read(encode([(b"y", b"1")]))
    one.blocks.decode(b"\x40\x01x\x7f" + bytes((3000 - 127 & 127 | 128, 3000 - 127 >> 7)) + value)
    count = LIST_BYTES_MAX // 3033
    one.read(NEWEST * count)
    with pytest.raises(ProtocolViolation) as caught:
        one.read(NEWEST * (count + 1))
    assert caught.value.code is ErrorCode.ENHANCE_YOUR_CALM


HEADER_LISTS = st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=40_000)))


@given(HEADER_LISTS)
def test_what_is_encoded_is_decoded_and_leaves_no_trace(headers: Headers) -> None:
    decoder = Decoder(2**30)
    for _ in range(2):
        decoded = decoder.decode(encode(headers), raw=True)
        assert [(bytes(name), bytes(value)) for name, value in decoded] == headers
        assert not any(isinstance(one, NeverIndexedHeaderTuple) for one in decoded)
    assert len(decoder.header_table.dynamic_entries) == 0


@given(st.lists(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.binary(max_size=60)))))
def test_blocks_of_a_client_with_a_table_are_read_as_without_a_memory(lists: list[Headers]) -> None:
    encoder, decoder, one = Encoder(), Decoder(), Understood()
    for i, headers in enumerate(lists * 2):
        if i % 7 == 6:
            encoder.header_table_size = 200 * (i % 3)
        block = encoder.encode(headers)
        expected = list(decoder.decode(block, raw=True))
        assert one.read(block) == expected == headers
