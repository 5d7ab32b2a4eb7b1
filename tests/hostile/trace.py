"""Records how a server read a client's bytes, in terms that two implementations have in common."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from hostile import frames as f

Settings = Sequence[tuple[int, int]]


@dataclass
class Request:
    """A stream as the client opened it.

    Attributes:
        was_reset: whether the client reset it.
    """

    fields: list[f.Header]
    body: bytes = b""
    has_ended: bool = False
    was_reset: bool = False


@dataclass
class Trace:
    """Requests by stream, and the control frames that the server sent.

    Attributes:
        reset_codes: codes of the server's RST_STREAMs, by stream.
        goaway_code: code of its GOAWAY; None while the connection is open.
        pongs: payloads of its PING ACKs, in order.
        settings_acks: number of its SETTINGS ACKs.
    """

    requests: dict[int, Request] = field(default_factory=dict)
    reset_codes: dict[int, int] = field(default_factory=dict)
    goaway_code: int | None = None
    pongs: list[bytes] = field(default_factory=list)
    settings_acks: int = 0
    _buffer: bytearray = field(default_factory=bytearray, repr=False, compare=False)

    def headers(self, stream: int, fields: list[f.Header], ends: bool) -> None:
        """Records a header block. A block of trailers only ends the request; no code reads
        trailers.
        """
        self.requests.setdefault(stream, Request(fields))
        self.requests[stream].has_ended |= ends

    def data(self, stream: int, payload: bytes, ends: bool) -> None:
        self.requests[stream].body += payload
        self.requests[stream].has_ended |= ends

    def reset(self, stream: int, responds: bool) -> None:
        """Records the client's reset. It does not count for a stream that the server itself had
        reset, or that has its response already: a server that ``responds`` does so immediately.
        """
        request = self.requests.get(stream)
        if request is None or stream in self.reset_codes or (responds and request.has_ended):
            return
        request.was_reset = True

    def sent(self, data: bytes) -> None:
        """Records the frames in bytes that the server sent."""
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
