"""HPACK (RFC 7541): header blocks to what they ask for, and headers to blocks.

A client's requests come in the same few blocks while its dynamic table does not change: such a
block is decoded, by the hpack package, and understood only once. Blocks that we write use no
table, so that they depend on nothing and can be made in advance.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError

from embedserve.wire.http2.frames import ErrorCode, ProtocolViolation

Headers = list[tuple[bytes, bytes]]
T = TypeVar("T")

LIST_BYTES_MAX = 64 << 10
"""Of a block's decoded headers, each with 32 bytes more; past it the connection ends."""
HEADER_WORK = 32
BLOCKS_MAX = 64
"""Remembered of a connection."""
BLOCK_BYTES_MAX = 4096
"""A longer one is not remembered."""
MANY_SIZE_UPDATES = re.compile(rb"([\x20-\x3e]|\x3f[\x80-\xff]*[\x00-\x7f]){3}")
"""More than RFC 7541, section 4.2, has a block begin with: each is a byte, and takes a header's
time."""
NO_TABLE = b"\x20"
"""A block that begins so takes the peer's view of our dynamic table to no bytes, once for all."""


class HeaderBlocks(Generic[T]):
    """Reads the header blocks of one connection, in their order.

    Attributes:
        known: what a block asks for that is read without decoding it.
        work: of the last block that was decoded: its bytes, and 32 for each header.
    """

    __slots__ = (
        "_decoder",
        "_understand",
        "known",
        "work",
    )

    def __init__(self, understand: Callable[[Headers], T]) -> None:
        """``understand`` makes of decoded headers what is remembered of their block, or raises."""
        self._understand = understand
        self._decoder = Decoder(LIST_BYTES_MAX)
        self.known: dict[bytes, T] = {}
        self.work = 0

    def read(self, block: bytes) -> T:
        """What ``block`` asks for.

        Raises:
            ProtocolViolation: it cannot be decoded, and so none after it.
            Exception: what ``understand`` raises; later blocks can be read.
        """
        known = self.known.get(block)
        if known is not None:
            return known
        headers, is_changed = self._decode(block)
        understood = self._understand(headers)
        if not is_changed and len(block) <= BLOCK_BYTES_MAX:
            if len(self.known) >= BLOCKS_MAX:
                self.known.clear()
            self.known[block] = understood
        return understood

    def decode(self, block: bytes) -> Headers:
        """The headers of ``block``, which is not remembered. Raises ProtocolViolation, as read."""
        return self._decode(block)[0]

    def _decode(self, block: bytes) -> tuple[Headers, bool]:
        """(headers, whether the table changed, after which blocks may mean something else)"""
        if MANY_SIZE_UPDATES.match(block):
            reason = "a header block with over 2 updates of the table's size"
            raise ProtocolViolation(ErrorCode.COMPRESSION_ERROR, reason)
        table = self._decoder.header_table
        entries = table.dynamic_entries
        # The newest entry itself and not its id, which another may have once it is gone.
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
        self.known.clear()
        return headers, True


def encode(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The block of ``headers`` (names in lower case): literals, not indexed, not compressed."""
    return b"".join([b"\0" + _string(name) + _string(value) for name, value in headers])


def _string(value: bytes) -> bytes:
    """A length in the 7-bit prefix form of RFC 7541, section 5.1, then the bytes themselves."""
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
