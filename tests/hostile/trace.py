"""What a server made of a client's bytes, in words that two implementations have in common."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from hostile import frames as f

Settings = Sequence[tuple[int, int]]


@dataclass
class Request:
    """A stream as the client opened it.

    Attributes:
        was_reset: by the client.
    """

    fields: list[f.Header]
    body: bytes = b""
    has_ended: bool = False
    was_reset: bool = False


@dataclass
class Trace:
    """Requests by stream, and what the server sent in answer to frames.

    Attributes:
        reset_codes: of the server's RST_STREAMs, by stream.
        goaway_code: of its GOAWAY; None while the connection goes on.
        pongs: what its PING ACKs said, in order.
        settings_acks: how many it sent.
    """

    requests: dict[int, Request] = field(default_factory=dict)
    reset_codes: dict[int, int] = field(default_factory=dict)
    goaway_code: int | None = None
    pongs: list[bytes] = field(default_factory=list)
    settings_acks: int = 0
    _buffer: bytearray = field(default_factory=bytearray, repr=False, compare=False)

    def headers(self, stream: int, fields: list[f.Header], ends: bool) -> None:
        """A header block; that of trailers, which nobody reads, ends a request and no more."""
        self.requests.setdefault(stream, Request(fields))
        self.requests[stream].has_ended |= ends

    def data(self, stream: int, payload: bytes, ends: bool) -> None:
        self.requests[stream].body += payload
        self.requests[stream].has_ended |= ends

    def reset(self, stream: int, answers: bool) -> None:
        """By the client; one that was answered (as a server that ``answers`` does at once), or
        that the server itself had reset, is no more."""
        request = self.requests.get(stream)
        if request is None or stream in self.reset_codes or (answers and request.has_ended):
            return
        request.was_reset = True

    def sent(self, data: bytes) -> None:
        """Bytes that the server sent."""
        self._buffer += data
        for one in f.take_frames(self._buffer):
            if one.type == f.RST_STREAM:
                self.reset_codes[one.stream] = struct.unpack(">L", one.payload)[0]
            elif one.type == f.GOAWAY:
                self.goaway_code = struct.unpack(">L", one.payload[4:8])[0]
            elif one.type == f.PING and one.flags & f.ACK:
                self.pongs.append(one.payload)
            elif one.type == f.SETTINGS and one.flags & f.ACK:
                self.settings_acks += 1
