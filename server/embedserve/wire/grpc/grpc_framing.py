"""gRPC as it is written over HTTP/2: framed messages, timeouts, status messages.

Pure functions and one buffer, without I/O (github.com/grpc/grpc, doc/PROTOCOL-HTTP2.md). What a
client framed wrongly is a WireError; what the messages say is not looked at here.
"""

from __future__ import annotations

import struct
import zlib
from urllib.parse import quote

from embedserve.wire.byte_queue import ByteQueue

PREFIX = struct.Struct(">BI")
"""Of a message: whether it is compressed, then its length."""
PREFIX_BYTES = PREFIX.size
ENCODINGS = b"identity,deflate,gzip"
"""What requests may be compressed with, as grpc-accept-encoding says it."""
WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
"""As zlib has them: gzip's header and trailer, or zlib's own."""
SECONDS_PER_UNIT = {
    ord("H"): 3600.0,
    ord("M"): 60.0,
    ord("S"): 1.0,
    ord("m"): 1e-3,
    ord("u"): 1e-6,
    ord("n"): 1e-9,
}
TIMEOUT_DIGITS_MAX = 8
UNRESERVED = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
"""What a status message holds as it is, beside letters and digits: all ASCII that prints but %."""


class WireError(Exception):
    """The client's bytes are not what gRPC sends.

    Attributes:
        code: the canonical code's name that the call ends with.
        message: a sentence for the caller.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def outcome(self) -> str:
        """As metrics count it, which know the codes of requests that could be read."""
        return "INVALID_ARGUMENT" if self.code == "UNIMPLEMENTED" else self.code


def framed(*parts: bytes | memoryview) -> bytes:
    """The message that ``parts`` make, with its prefix, uncompressed."""
    size = sum([memoryview(part).nbytes for part in parts])
    return b"".join((b"\0", size.to_bytes(4, "big"), *parts))


def timeout_s(value: bytes) -> float:
    """Seconds of a grpc-timeout header, such as b"250m".

    Raises:
        WireError: INTERNAL, it is none.
    """
    digits, unit = value[:-1], value[-1:]
    if len(digits) <= TIMEOUT_DIGITS_MAX and digits.isdigit() and unit[0] in SECONDS_PER_UNIT:
        return int(digits) * SECONDS_PER_UNIT[unit[0]]
    raise WireError("INTERNAL", f"grpc-timeout is {value.decode('latin-1')!r}")


def percent_encoded(message: str) -> bytes:
    """``message`` as grpc-message has it."""
    return quote(message, safe=UNRESERVED).encode()


def only_message(body: bytes, bytes_max: int) -> bytes | None:
    """The message if ``body`` is exactly one, uncompressed and not over ``bytes_max``."""
    size = len(body) - PREFIX_BYTES
    if size < 0 or size > bytes_max or PREFIX.unpack_from(body) != (0, size):
        return None
    return body[PREFIX_BYTES:]


class Deframer:
    """Cuts messages out of the chunks of a request's body, and decompresses them.

    Attributes:
        nbytes: not cut out yet.
    """

    def __init__(self, bytes_max: int, encoding: bytes) -> None:
        """``bytes_max`` bounds a message both as it came and decompressed.

        Raises:
            WireError: UNIMPLEMENTED, there is no such ``encoding`` here.
        """
        if encoding != b"identity" and encoding not in WINDOW_BITS:
            name = encoding.decode("latin-1")
            raise WireError("UNIMPLEMENTED", f"grpc-encoding is {name!r}, which is not supported")
        self._bytes_max = bytes_max
        self._encoding = encoding
        self._pieces = ByteQueue()

    @property
    def nbytes(self) -> int:
        return self._pieces.nbytes

    def feed(self, chunk: bytes) -> None:
        self._pieces.append(chunk)

    def next_message(self) -> bytes | None:
        """The next message, or None until more is fed.

        Raises:
            WireError: RESOURCE_EXHAUSTED, it is too large; INTERNAL, it is no message.
        """
        pieces = self._pieces
        if pieces.nbytes < PREFIX_BYTES:
            return None
        flag, size = PREFIX.unpack(pieces.front(PREFIX_BYTES))
        if size > self._bytes_max:
            raise self._too_large(size)
        if pieces.nbytes < PREFIX_BYTES + size:
            return None
        message = pieces.take(PREFIX_BYTES + size, PREFIX_BYTES)
        if flag == 0:
            return message
        if flag != 1 or self._encoding == b"identity":
            raise WireError("INTERNAL", "a message is compressed, but grpc-encoding names no way")
        return self._decompressed(message)

    def check_end(self) -> None:
        """Raises WireError (INTERNAL) if the body ended within a message."""
        if self._pieces.nbytes:
            raise WireError("INTERNAL", "the request ended within a message")

    def check_size(self) -> int:
        """How many bytes the message lacks that has begun; 0 where its size has not come.

        Raises:
            WireError: RESOURCE_EXHAUSTED, it is too large.
        """
        nbytes = self._pieces.nbytes
        if nbytes < PREFIX_BYTES:
            return 0
        size: int = PREFIX.unpack(self._pieces.front(PREFIX_BYTES))[1]
        if size > self._bytes_max:
            raise self._too_large(size)
        return max(0, PREFIX_BYTES + size - nbytes)

    def _too_large(self, size: int | str) -> WireError:
        return WireError(
            "RESOURCE_EXHAUSTED",
            f"the message has {size} bytes, the limit is {self._bytes_max} (--body-bytes-max)",
        )

    def _decompressed(self, message: bytes) -> bytes:
        """Never makes more than a byte past the limit."""
        stream = zlib.decompressobj(WINDOW_BITS[self._encoding])
        try:
            whole = stream.decompress(message, self._bytes_max + 1)
        except zlib.error as error:
            raise WireError("INTERNAL", f"a message cannot be decompressed: {error}") from error
        if len(whole) > self._bytes_max:
            raise self._too_large(f"over {self._bytes_max} decompressed")
        if not stream.eof or stream.unused_data:
            raise WireError("INTERNAL", "a message cannot be decompressed: it has another length")
        return whole
