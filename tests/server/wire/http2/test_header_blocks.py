"""Tests of HPACK: blocks are cached while their meaning stays; any decoder reads our blocks."""

import pytest
from hpack import Decoder, Encoder
from hpack.struct import NeverIndexedHeaderTuple
from hypothesis import given
from hypothesis import strategies as st

from embedserve.shard_client.call_headers import CallHeaders
from embedserve.wire.http2.control import HEADER_LIST_BYTES_MAX
from embedserve.wire.http2.frames import ErrorCode, ProtocolViolation
from embedserve.wire.http2.header_blocks import (
    BLOCKS_MAX,
    CACHED_BLOCK_BYTES_MAX,
    CACHED_BYTES_MAX,
    HEADER_MEMORY_BYTES,
    LIST_BYTES_MAX,
    HeaderBlocks,
    encode,
)
from embedserve.wire.http_stream import Headers

GET: Headers = [(b":method", b"GET"), (b":path", b"/")]


class CountingReader:
    """Counts the blocks that were parsed."""

    def __init__(self) -> None:
        self.parsed: list[Headers] = []
        self.blocks: HeaderBlocks[Headers] = HeaderBlocks(self._parse)

    def _parse(self, headers: Headers) -> Headers:
        self.parsed.append(headers)
        return headers

    def read(self, block: bytes) -> Headers:
        return self.blocks.read(block)


def literal(name: bytes, value: bytes, *, first: int) -> bytes:
    """Returns a literal field; ``first`` decides whether it enters the table (RFC 7541, 6.2)."""
    assert len(name) < 127 > len(value)
    return bytes((first, len(name))) + name + bytes((len(value),)) + value


WITH_INDEXING = 0x40
"""First byte of a literal with incremental indexing, which changes the table."""
WITHOUT_INDEXING = 0x00
NEWEST = b"\xbe"
"""Index of the dynamic table's newest entry (62)."""


def test_block_that_leaves_the_table_unchanged_is_parsed_once() -> None:
    reader = CountingReader()
    block = literal(b"x", b"1", first=WITHOUT_INDEXING)
    assert block not in reader.blocks.cached
    for _ in range(5):
        assert reader.read(block) == [(b"x", b"1")]
    assert block in reader.blocks.cached
    assert len(reader.parsed) == 1


def test_repeated_headers_are_parsed_only_until_the_table_has_them() -> None:
    reader, encoder = CountingReader(), Encoder()
    headers = [*GET, (b"user-agent", b"grpc-python/1.70"), (b"te", b"trailers")]
    for _ in range(10):
        assert reader.read(encoder.encode(headers)) == headers
    assert len(reader.parsed) == 2


def test_block_that_changes_the_table_is_not_cached() -> None:
    reader = CountingReader()
    block = literal(b"x", b"1", first=WITH_INDEXING)
    for _ in range(3):
        reader.read(block)
    assert len(reader.parsed) == 3
    assert block not in reader.blocks.cached


@pytest.mark.parametrize("how", ["read", "decode"])
def test_cached_blocks_are_dropped_when_the_table_changes(how: str) -> None:
    """Checks that the cache is cleared, since the block now means something else. Trailers,
    which are only decoded, change the table, too.
    """
    reader = CountingReader()
    reader.read(literal(b"x", b"1", first=WITH_INDEXING))
    assert [reader.read(NEWEST) for _ in range(2)] == [[(b"x", b"1")]] * 2
    assert NEWEST in reader.blocks.cached
    change = literal(b"x", b"2", first=WITH_INDEXING)
    if how == "read":
        reader.read(change)
    else:
        assert reader.blocks.decode(change) == [(b"x", b"2")]
    assert NEWEST not in reader.blocks.cached
    assert reader.read(NEWEST) == [(b"x", b"2")]


def test_cached_blocks_are_dropped_when_a_full_table_changes() -> None:
    """Checks a full table, whose length stays constant: each new entry evicts another."""
    reader = CountingReader()
    value = b"v" * 100
    for i in range(60):
        reader.read(literal(b"x", value + b"%d" % (i % 10), first=WITH_INDEXING))
    before = reader.read(NEWEST)
    assert NEWEST in reader.blocks.cached
    reader.read(literal(b"x", value + b"0", first=WITH_INDEXING))
    assert NEWEST not in reader.blocks.cached
    assert reader.read(NEWEST) == [(b"x", value + b"0")] != before


@pytest.mark.parametrize("size", [b"\x20", b"\x3f\x09"])
def test_cached_blocks_are_dropped_when_the_table_shrinks(size: bytes) -> None:
    reader = CountingReader()
    reader.read(literal(b"x", b"1", first=WITH_INDEXING))
    reader.read(NEWEST)
    assert reader.read(size + literal(b"y", b"2", first=WITHOUT_INDEXING)) == [(b"y", b"2")]
    assert NEWEST not in reader.blocks.cached


def test_trailers_that_leave_the_table_unchanged_keep_the_cache() -> None:
    reader = CountingReader()
    block = literal(b"x", b"1", first=WITHOUT_INDEXING)
    reader.read(block)
    assert reader.blocks.decode(literal(b"y", b"2", first=WITHOUT_INDEXING)) == [(b"y", b"2")]
    assert block in reader.blocks.cached


def held_bytes(block: bytes, headers: Headers) -> int:
    return len(block) + sum(len(name) + len(value) + HEADER_MEMORY_BYTES for name, value in headers)


@pytest.mark.parametrize("over", [0, 1])
def test_large_blocks_are_not_cached(over: int) -> None:
    reader = CountingReader()
    headers = [(b"x", b""), (b"y", b"v" * 1000)]
    more = CACHED_BLOCK_BYTES_MAX - held_bytes(encode(headers), headers)
    headers[1] = (b"y" + b"y" * (more % 2), b"v" * (1000 + more // 2 + over))
    block = encode(headers)
    assert held_bytes(block, headers) - CACHED_BLOCK_BYTES_MAX in (2 * over, 2 * over + 1)
    reader.read(block)
    assert (block in reader.blocks.cached) == (not over)


@pytest.mark.parametrize("count", [125, 300, 1385])
def test_blocks_of_many_small_headers_are_not_cached(count: int) -> None:
    """Sends headers of the static table without values, one byte each."""
    reader = CountingReader()
    block = b"\x82\x84\x86" + b"\x8f" * count
    assert len(reader.read(block)) == 3 + count
    assert (reader.blocks.cached, reader.blocks.cached_bytes) == ({}, 0)


def test_header_lists_over_the_size_limit_are_not_cached() -> None:
    """Sends a list whose headers are table entries of one byte each."""
    reader = CountingReader()
    reader.read(literal(b"x" * 100, b"v" * 100, first=WITH_INDEXING))
    count = HEADER_LIST_BYTES_MAX // (200 + 32) + 1
    assert len(reader.read(NEWEST * count)) == count
    assert reader.blocks.cached == {}


def test_block_cache_is_bounded_in_bytes() -> None:
    reader = CountingReader()
    for i in range(3 * BLOCKS_MAX):
        block = b"\x8f" * 60 + literal(b"x", b"%d" % i, first=WITHOUT_INDEXING)
        reader.read(block)
        assert block in reader.blocks.cached
        held = sum(held_bytes(*entry) for entry in reader.blocks.cached.items())
        assert held == reader.blocks.cached_bytes <= CACHED_BYTES_MAX
    assert len(reader.blocks.cached) < BLOCKS_MAX
    reader.read(literal(b"y", b"1", first=WITH_INDEXING))
    assert (reader.blocks.cached, reader.blocks.cached_bytes) == ({}, 0)


def test_blocks_of_routers_and_traced_clients_fit_in_the_cache() -> None:
    routers, clients = CountingReader(), CountingReader()
    token = (b"authorization", b"Bearer es_" + b"t" * 43)
    path = "/inference.GRPCInferenceService/ModelInfer"
    calls = CallHeaders("embedserve-part-10.embedserve:9000", path, metadata=[token])
    for i in range(BLOCKS_MAX):
        routers.read(calls.block(1e-4 * 1.2**i))
    assert len(routers.blocks.cached) == BLOCKS_MAX
    more = [(b"user-agent", b"grpc-python/1.70.0 grpc-c/45.0.0 (linux; chttp2)")]
    more += [(b"accept-encoding", b"gzip"), (b"grpc-accept-encoding", b"identity, deflate, gzip")]
    for i in range(48):
        traced = (b"traceparent", b"00-%032x-%016x-01" % (i, i))
        clients.read(calls.block(1.0) + encode([*more, traced]))
    assert len(clients.blocks.cached) == 48


def test_number_of_cached_blocks_is_bounded() -> None:
    reader = CountingReader()
    blocks = [literal(b"x", b"%d" % i, first=WITHOUT_INDEXING) for i in range(5 * BLOCKS_MAX)]
    for block in blocks:
        reader.read(block)
        assert sum(block in reader.blocks.cached for block in blocks) <= BLOCKS_MAX
    assert blocks[-1] in reader.blocks.cached


def test_block_that_fails_to_parse_is_not_cached() -> None:
    def reject_bad(headers: Headers) -> Headers:
        if headers[0][0] == b"bad":
            raise ValueError("bad")
        return headers

    blocks: HeaderBlocks[Headers] = HeaderBlocks(reject_bad)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            blocks.read(literal(b"bad", b"1", first=WITH_INDEXING))
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
def test_undecodable_block_is_a_compression_error(block: bytes) -> None:
    with pytest.raises(ProtocolViolation) as caught:
        CountingReader().read(block)
    assert caught.value.code is ErrorCode.COMPRESSION_ERROR


@given(st.binary(max_size=60))
def test_random_bytes_decode_to_headers_or_a_connection_error(block: bytes) -> None:
    code = None
    headers: Headers = []
    try:
        headers = CountingReader().read(block)
    except ProtocolViolation as error:
        code = error.code
    assert code in (None, ErrorCode.COMPRESSION_ERROR, ErrorCode.ENHANCE_YOUR_CALM)
    assert all(isinstance(reader, bytes) for header in headers for reader in header)


@pytest.mark.parametrize("update", [b"\x20", b"\x3f\xe1\x1f", b"\x3f\x00"])
def test_block_with_over_two_table_size_updates_is_rejected(update: bytes) -> None:
    assert CountingReader().read(2 * update + encode(GET)) == GET
    with pytest.raises(ProtocolViolation, match="over 2 updates") as raised:
        CountingReader().read(3 * update + encode(GET))
    assert raised.value.code == ErrorCode.COMPRESSION_ERROR


def test_header_list_over_the_decoded_size_limit_is_rejected() -> None:
    reader = CountingReader()
    value = b"v" * 3000
    reader.read(encode([(b"y", b"1")]))
    reader.blocks.decode(
        b"\x40\x01x\x7f" + bytes((3000 - 127 & 127 | 128, 3000 - 127 >> 7)) + value
    )
    count = LIST_BYTES_MAX // 3033
    reader.read(NEWEST * count)
    with pytest.raises(ProtocolViolation) as caught:
        reader.read(NEWEST * (count + 1))
    assert caught.value.code is ErrorCode.ENHANCE_YOUR_CALM


HEADER_LISTS = st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=40_000)))


@given(HEADER_LISTS)
def test_encoded_blocks_round_trip_without_adding_table_entries(headers: Headers) -> None:
    decoder = Decoder(2**30)
    for _ in range(2):
        decoded = decoder.decode(encode(headers), raw=True)
        assert [(bytes(name), bytes(value)) for name, value in decoded] == headers
        assert not any(isinstance(reader, NeverIndexedHeaderTuple) for reader in decoded)
    assert len(decoder.header_table.dynamic_entries) == 0


@given(st.lists(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.binary(max_size=60)))))
def test_cached_blocks_decode_like_blocks_without_a_cache(lists: list[Headers]) -> None:
    encoder, decoder, reader = Encoder(), Decoder(), CountingReader()
    for i, headers in enumerate(lists * 2):
        if i % 7 == 6:
            encoder.header_table_size = 200 * (i % 3)
        block = encoder.encode(headers)
        expected = list(decoder.decode(block, raw=True))
        assert reader.read(block) == expected == headers
