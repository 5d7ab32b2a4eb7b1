"""gRPC wire format over HTTP/2: framed messages, timeouts and status messages.

Pure functions and one buffer, without I/O (github.com/grpc/grpc, doc/PROTOCOL-HTTP2.md). Malformed
framing raises GrpcCallError. The contents of messages are not parsed here.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from urllib.parse import quote

from embedserve.errors import EmbedServeError
from embedserve.wire.byte_queue import ByteQueue

PREFIX = struct.Struct(">BI")
"""Prefix of a message: compressed flag, then length."""
PREFIX_BYTES = PREFIX.size
WINDOW_BITS = {b"deflate": 15, b"gzip": 31}
"""zlib window bits by encoding: with zlib's own header and trailer, or with those of gzip."""
ENCODINGS = b",".join((b"identity", *WINDOW_BITS))
"""Supported compressions of requests, as the value of grpc-accept-encoding."""
MESSAGE_WORK = 256
"""Work units of one message. A connection has WORK_PER_TURN in an event-loop iteration."""
DECOMPRESSED_BYTES_PER_WORK = 16
"""Bytes of a decompressed message for each further work unit."""
INLINE_MESSAGE_BYTES_MAX = 64 << 10
"""Bytes to which a message is decompressed on the event loop; a larger one is a LargeMessage."""
STEP_BYTES = 64 << 10
"""Bytes that a larger message is decompressed by at a time. zlib copies its output while it holds
the interpreter lock, so that a whole message would stop the event loop for 60 ms and more. With
steps of 256 KiB rejected messages left more memory in the process."""
PLAIN_BYTES_MAX = INLINE_MESSAGE_BYTES_MAX
"""Bytes of a message to a plain method, which does no lookup, such as health, reflection and
management."""
BODY_LIMIT = "--body-bytes-max"
PLAIN_LIMIT = "fixed for methods without a lookup"
SECONDS_PER_UNIT = {
    ord("H"): 3600.0,
    ord("M"): 60.0,
    ord("S"): 1.0,
    ord("m"): 1e-3,
    ord("u"): 1e-6,
    ord("n"): 1e-9,
}
TIMEOUT_DIGITS_MAX = 8
"""Digits of a grpc-timeout, as its specification has it."""
UNRESERVED = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
"""Characters of a status message that are not percent-encoded, besides letters and digits: all
printable ASCII except %."""


@dataclass(frozen=True, slots=True)
class GrpcHeaders:
    """Headers of calls of one method.

    Attributes:
        encoding: value of grpc-encoding.
        timeout_s: value of grpc-timeout in seconds; None without the header.
        by_name: value of each header by name.
    """

    encoding: bytes
    timeout_s: float | None
    by_name: dict[bytes, bytes]


class GrpcCallError(EmbedServeError):
    """Ends a whole gRPC call, also that of a stream: the client's bytes are malformed, its method
    or encoding is unknown, a message is too large, or the upload is late.

    Attributes:
        grpc_status: name of the canonical status code that ends the call.
        code: name that the call is counted under. For a malformed message gRPC prescribes INTERNAL,
            which in metrics and alerts is a fault of the server.
    """

    def __init__(self, grpc_status: str, message: str) -> None:
        super().__init__(message)
        self.grpc_status = grpc_status
        self.code = "INVALID_ARGUMENT" if grpc_status == "INTERNAL" else grpc_status


def framed(*chunks: bytes | memoryview) -> bytes:
    """Returns ``chunks`` joined into one uncompressed message with its prefix."""
    size = sum([memoryview(chunk).nbytes for chunk in chunks])
    return b"".join((b"\0", size.to_bytes(4, "big"), *chunks))


def parse_timeout(value: bytes) -> float:
    """Parses a grpc-timeout header, such as b"250m". Returns seconds.

    Raises:
        GrpcCallError: INTERNAL, the value is malformed.
    """
    digits, unit = value[:-1], value[-1:]
    if len(digits) <= TIMEOUT_DIGITS_MAX and digits.isdigit() and unit[0] in SECONDS_PER_UNIT:
        return int(digits) * SECONDS_PER_UNIT[unit[0]]
    raise GrpcCallError("INTERNAL", f"grpc-timeout is {value.decode('latin-1')!r}")


def percent_encoded(message: str) -> bytes:
    """Returns ``message`` percent-encoded for the grpc-message trailer."""
    return quote(message, safe=UNRESERVED).encode()


class LargeMessage:
    """A compressed message of more than INLINE_MESSAGE_BYTES_MAX, to be decompressed off the event
    loop.

    Attributes:
        nbytes: bytes of the message as received, which it holds until it is decompressed.
    """

    __slots__ = ("_bytes_max", "_encoding", "_limit", "_message", "nbytes")

    def __init__(self, message: bytes, encoding: bytes, bytes_max: int, limit: str) -> None:
        self._message = message
        self._encoding = encoding
        self._bytes_max = bytes_max
        self._limit = limit
        self.nbytes = len(message)

    def whole(self) -> bytes:
        """Returns all of the message.

        Raises:
            GrpcCallError: the message is too large, or its compression is malformed.
        """
        stream = zlib.decompressobj(WINDOW_BITS[self._encoding])
        chunks, nbytes = [], 0
        for start in range(0, len(self._message), STEP_BYTES):
            if stream.eof:
                raise _wrong_length()
            chunk = _decompressed(stream, self._message[start : start + STEP_BYTES], STEP_BYTES)
            while chunk:
                nbytes += len(chunk)
                if nbytes > self._bytes_max:
                    size = f"over {self._bytes_max} decompressed"
                    raise _too_large(size, self._bytes_max, self._limit)
                chunks.append(chunk)
                # More may follow even if the tail is empty: zlib holds what found no room.
                chunk = _decompressed(stream, stream.unconsumed_tail, STEP_BYTES)
        _check_whole(stream)
        return b"".join(chunks)


class Deframer:
    """Extracts messages from the chunks of a request body, and decompresses small ones.

    Attributes:
        encoding: value of grpc-encoding.
        nbytes: buffered bytes of messages that are not extracted yet.
        work: work units of the messages extracted so far.
    """

    def __init__(self, bytes_max: int, encoding: bytes, limit: str = BODY_LIMIT) -> None:
        """
        Args:
            bytes_max: limit of a message in bytes, both as received and decompressed.
            encoding: value of grpc-encoding.
            limit: name of that limit, for the error.

        Raises:
            GrpcCallError: UNIMPLEMENTED, ``encoding`` is not supported.
        """
        if encoding != b"identity" and encoding not in WINDOW_BITS:
            name = encoding.decode("latin-1")
            raise GrpcCallError(
                "UNIMPLEMENTED", f"grpc-encoding is {name!r}, which is not supported"
            )
        self._bytes_max = bytes_max
        self._limit = limit
        self.encoding = encoding
        self._buffered = ByteQueue()
        self.work = 0

    @property
    def nbytes(self) -> int:
        return self._buffered.nbytes

    def feed(self, chunk: bytes) -> None:
        self._buffered.append(chunk)

    def next_message(self) -> bytes | LargeMessage | None:
        """Returns the next message, or None if it is incomplete.

        Raises:
            GrpcCallError: RESOURCE_EXHAUSTED, the message is too large; INTERNAL, it cannot be
                decompressed.
        """
        buffered = self._buffered
        if buffered.nbytes < PREFIX_BYTES:
            return None
        flag, size = PREFIX.unpack(buffered.front(PREFIX_BYTES))
        if size > self._bytes_max:
            raise self._too_large(size)
        if buffered.nbytes < PREFIX_BYTES + size:
            return None
        self.work += MESSAGE_WORK
        message = buffered.take(PREFIX_BYTES + size, PREFIX_BYTES)
        if flag == 0:
            return message
        if flag != 1 or self.encoding == b"identity":
            raise GrpcCallError(
                "INTERNAL", "a message is compressed, but grpc-encoding names no way"
            )
        return self._read(message)

    def drop(self) -> None:
        """Drops the buffered bytes, after the call has ended."""
        self._buffered = ByteQueue()

    def check_end(self) -> None:
        """Raises GrpcCallError (INTERNAL) if the body ended within a message."""
        if self._buffered.nbytes:
            raise GrpcCallError("INTERNAL", "the request ended within a message")

    def check_size(self) -> int:
        """Returns the missing bytes of the next message: 0 if its prefix has not arrived, below 0
        if more bytes follow it.

        Raises:
            GrpcCallError: RESOURCE_EXHAUSTED, the message is too large.
        """
        nbytes = self._buffered.nbytes
        if nbytes < PREFIX_BYTES:
            return 0
        size: int = PREFIX.unpack(self._buffered.front(PREFIX_BYTES))[1]
        if size > self._bytes_max:
            raise self._too_large(size)
        return PREFIX_BYTES + size - nbytes

    def _too_large(self, size: int | str) -> GrpcCallError:
        return _too_large(size, self._bytes_max, self._limit)

    def _read(self, message: bytes) -> bytes | LargeMessage:
        """Decompresses ``message`` if that is quick."""
        stream = zlib.decompressobj(WINDOW_BITS[self.encoding])
        size = inline_bytes = min(self._bytes_max, INLINE_MESSAGE_BYTES_MAX)
        try:
            whole = _decompressed(stream, message, inline_bytes + 1)
            size = len(whole)
        finally:
            self.work += size // DECOMPRESSED_BYTES_PER_WORK
        if len(whole) > inline_bytes:
            if inline_bytes < self._bytes_max:
                return LargeMessage(message, self.encoding, self._bytes_max, self._limit)
            raise self._too_large(f"over {self._bytes_max} decompressed")
        _check_whole(stream)
        return whole


def _too_large(size: int | str, bytes_max: int, limit: str) -> GrpcCallError:
    return GrpcCallError(
        "RESOURCE_EXHAUSTED", f"the message has {size} bytes, the limit is {bytes_max} ({limit})"
    )


def _decompressed(stream: zlib._Decompress, message: bytes, bytes_max: int) -> bytes:
    """Returns at most ``bytes_max`` of what ``stream`` decompresses ``message`` to."""
    try:
        return stream.decompress(message, bytes_max)
    except zlib.error as error:
        raise GrpcCallError("INTERNAL", f"a message cannot be decompressed: {error}") from error


def _check_whole(stream: zlib._Decompress) -> None:
    """Raises GrpcCallError (INTERNAL) unless ``stream`` has ended with its input."""
    if not stream.eof or stream.unused_data:
        raise _wrong_length()


def _wrong_length() -> GrpcCallError:
    return GrpcCallError("INTERNAL", "a message cannot be decompressed: it has another length")
