"""Body of a unary call: exactly one message."""

from __future__ import annotations

from embedserve.wire.grpc.grpc_framing import BODY_LIMIT, Deframer, LargeMessage, WireError
from embedserve.wire.http2.stream import Stream


class UnaryBody:
    """The body of a unary call, received in chunks."""

    __slots__ = ("_bytes_max", "_deframer", "_encoding", "_limit", "_stream")

    def __init__(
        self, stream: Stream, encoding: bytes, bytes_max: int, limit: str = BODY_LIMIT
    ) -> None:
        self._stream = stream
        self._encoding = encoding
        self._bytes_max = bytes_max
        self._limit = limit
        self._deframer: Deframer | None = None

    def receive(self, data: bytes, is_end: bool) -> bytes | LargeMessage | None:
        """Takes a chunk. Returns the message after the last chunk, otherwise None.

        Raises:
            WireError: the body is not exactly one message, or the message is too large, or its
                framing or compression is malformed.
        """
        if self._deframer is None:
            self._deframer = Deframer(self._bytes_max, self._encoding, self._limit)
        deframer = self._deframer
        deframer.feed(data)
        if not is_end:
            # The prefix has the size: a message that is too large is rejected before it arrives.
            self._stream.expect(deframer.check_size())
            return None
        self._stream.consumed(self._stream.held_bytes)
        try:
            message = deframer.next_message()
        finally:
            if self._encoding != b"identity":
                self._stream.connection.spend_turn(deframer.work)
        if message is None:
            deframer.check_end()
            raise WireError("UNIMPLEMENTED", "the method requires exactly one message: none came")
        if deframer.nbytes:
            raise WireError("UNIMPLEMENTED", "the method requires exactly one message: more came")
        return message
