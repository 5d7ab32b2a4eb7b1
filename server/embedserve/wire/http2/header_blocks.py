"""HPACK (RFC 7541): a cache from header blocks to resolved routes, and an encoder.

A client repeats the same few blocks while its dynamic table does not change. Such a block is
decoded, by the hpack package, and resolved only once. Blocks that the server writes use no dynamic
table, so that they are stateless and can be built in advance.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError

from embedserve.wire.http2.frames import ErrorCode, ProtocolViolation
from embedserve.wire.http_stream import Headers

T = TypeVar("T")

LIST_BYTES_MAX = 64 << 10
"""Bytes of a block's decoded headers, plus 32 each; a larger list ends the connection."""
HEADER_WORK = 32
BLOCKS_MAX = 64
"""Header blocks cached per connection; the cache is cleared when it is full."""
HEADER_MEMORY_BYTES = 128
"""Approximate bytes of memory per cached header, without its name and value."""
CACHED_BLOCK_BYTES_MAX = 16 << 10
"""Approximate bytes of memory of the largest block that is cached, with its headers. Lists over the
16 KiB that requests may have are larger, so their rejections are never cached."""
CACHED_BYTES_MAX = 128 << 10
"""Approximate bytes of memory of a connection's cached blocks; a block beyond it clears the cache.
64 blocks of a router's calls, or some 50 of a gRPC client with a token and a trace, need less."""
MANY_SIZE_UPDATES = re.compile(rb"([\x20-\x3e]|\x3f[\x80-\xff]*[\x00-\x7f]){3}")
"""Blocks that begin with three or more dynamic table size updates; RFC 7541, section 4.2, has at
most two. An update may be one byte, and takes as long to decode as a header."""
NO_TABLE = b"\x20"
"""Prefix of the first block sent: a dynamic table size update to 0, which holds for the
connection."""


class HeaderBlocks(Generic[T]):
    """Decoder and cache of one connection's header blocks, which are read in order.

    Attributes:
        cached: cached results by header block; such blocks need no decoding.
        cached_bytes: approximate bytes of memory that they hold.
        work: work units of the block decoded last: its bytes, plus 32 per header.
    """

    __slots__ = (
        "_convert",
        "_decoder",
        "cached",
        "cached_bytes",
        "work",
    )

    def __init__(self, convert: Callable[[Headers], T]) -> None:
        """
        Args:
            convert: converts decoded headers to the cached result; may raise.
        """
        self._convert = convert
        self._decoder = Decoder(LIST_BYTES_MAX)
        self.cached: dict[bytes, T] = {}
        self.cached_bytes = 0
        self.work = 0

    def read(self, block: bytes) -> T:
        """Returns the result of ``convert`` for the headers of ``block``, cached if possible.

        Raises:
            ProtocolViolation: the block cannot be decoded, and neither can any later block.
            Exception: ``convert`` raised it; later blocks can still be read.
        """
        cached = self.cached.get(block)
        if cached is not None:
            return cached
        headers, is_changed = self._decode(block)
        converted = self._convert(headers)
        if not is_changed:
            self._cache(block, headers, converted)
        return converted

    def _cache(self, block: bytes, headers: Headers, converted: T) -> None:
        """Caches ``converted``, which may keep ``headers``, unless it is large."""
        nbytes = len(block) + sum(
            len(name) + len(value) + HEADER_MEMORY_BYTES for name, value in headers
        )
        if nbytes > CACHED_BLOCK_BYTES_MAX:
            return
        if len(self.cached) >= BLOCKS_MAX or self.cached_bytes + nbytes > CACHED_BYTES_MAX:
            self.clear()
        self.cached[block] = converted
        self.cached_bytes += nbytes

    def clear(self) -> None:
        """Clears the cache."""
        self.cached.clear()
        self.cached_bytes = 0

    def decode(self, block: bytes) -> Headers:
        """Decodes ``block`` without caching it. Raises ProtocolViolation, like ``read``."""
        return self._decode(block)[0]

    def _decode(self, block: bytes) -> tuple[Headers, bool]:
        """Returns (headers, whether the dynamic table changed).

        A change clears the cache, because cached blocks may then decode differently.
        """
        if MANY_SIZE_UPDATES.match(block):
            reason = "a header block with over 2 updates of the table's size"
            raise ProtocolViolation(ErrorCode.COMPRESSION_ERROR, reason)
        table = self._decoder.header_table
        entries = table.dynamic_entries
        # The newest entry itself and not its id(), which may be reused after the entry is freed.
        newest, count, size = entries[0] if entries else None, len(entries), table.maxsize
        try:
            headers: Headers = list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            raise ProtocolViolation(ErrorCode.ENHANCE_YOUR_CALM, str(error)) from error
        except (HPACKError, IndexError, ValueError) as error:
            raise ProtocolViolation(ErrorCode.COMPRESSION_ERROR, str(error)) from error
        self.work = len(block) + HEADER_WORK * len(headers)
        is_same = (len(entries), table.maxsize) == (count, size)
        if is_same and (not entries or entries[0] is newest):
            return headers, False
        self.clear()
        return headers, True


def encode(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encodes ``headers`` (names in lower case) as literals, without indexing or compression."""
    return b"".join([b"\0" + _string(name) + _string(value) for name, value in headers])


def _string(value: bytes) -> bytes:
    """Encodes the length as a 7-bit prefix integer (RFC 7541, section 5.1), then the bytes."""
    length = len(value)
    if length < 127:
        return bytes((length,)) + value
    rest = length - 127
    encoded = bytearray((127,))
    while rest >= 128:
        encoded.append(rest & 127 | 128)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded) + value
