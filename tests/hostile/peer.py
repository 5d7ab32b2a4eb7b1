"""One HTTP/2 connection of a client that obeys no rule: it sends bytes and stores what it receives.

The client is blocking, with a limit on every wait. It acknowledges the server's first SETTINGS
unless ``acknowledges`` is False. It does nothing else by itself: it opens no window and answers no
PING.
"""

import select
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from hostile import frames as f
from hostile.frames import Frame
from hpack import Decoder

WAIT_S_MAX = 25.0
"""Seconds to wait for whatever a server does immediately; it may share two cores with other work.
After 30 s (UNSENT_S_MAX, UPLOAD_S_MAX) the server ends the streams that a test does not read."""
READ_BYTES = 1 << 18
WIDE = f.settings((f.INITIAL_WINDOW_SIZE, f.WINDOW_MAX))
"""SETTINGS with the largest initial window, so that responses of any size need no WINDOW_UPDATE."""
WIDER = f.window_update(0, f.WINDOW_MAX - 65_535)
GREETING = f.PREFACE + WIDE + WIDER


@dataclass
class Response:
    """The response on one stream."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)
    reset_code: int | None = None
    is_whole: bool = False

    @property
    def status(self) -> int:
        return int(self.headers[":status"])

    @property
    def grpc_status(self) -> int:
        """gRPC's code, from the trailers or from the headers of a trailers-only response."""
        return int((self.trailers or self.headers)["grpc-status"])

    @property
    def grpc_message(self) -> str:
        return (self.trailers or self.headers).get("grpc-message", "")


class Peer:
    """A connection, the responses on its streams, and how it ended.

    Attributes:
        responses: responses received so far, by stream.
        goaway_code: code of the last GOAWAY; None before.
        is_closed: whether the server has closed the connection.
        others: other frames: SETTINGS, PING, WINDOW_UPDATE.
    """

    def __init__(
        self,
        port: int,
        greeting: bytes = GREETING,
        acknowledges: bool = True,
        receive_buffer: int | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.sock = socket.socket()
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.connect(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.sock.settimeout(WAIT_S_MAX)
            self.sock = tls.wrap_socket(self.sock, server_hostname="localhost")
        self.sock.setblocking(False)
        self.responses: dict[int, Response] = {}
        self.others: list[Frame] = []
        self.goaway_code: int | None = None
        self.is_closed = False
        self._decoder = Decoder(max_header_list_size=1 << 20)
        self._block = b""
        self._buffer = bytearray()
        try:
            self.send(greeting)
            if acknowledges:
                self._wait_for(lambda: self.of_type(f.SETTINGS), "SETTINGS")
                self.send(f.settings_ack())
        except BaseException:
            self.close()
            raise

    def of_type(self, type_: int) -> list[Frame]:
        """Returns the frames of this type among `others`."""
        return [one for one in self.others if one.type == type_]

    def send(self, sent: bytes, reads: bool = True, wait_s: float = WAIT_S_MAX) -> int:
        """Sends until all bytes are sent, the server has closed, or it takes no byte for
        ``wait_s``. Returns how many bytes it sent. If it ``reads``, it receives frames meanwhile.
        """
        rest, end = memoryview(sent), monotonic() + wait_s
        while rest and not self.is_closed:
            readers = [self.sock] if reads else []
            readable, writable, _ = select.select(
                readers, [self.sock], [], max(end - monotonic(), 0)
            )
            if not readable and not writable:
                break
            if readable:
                self._read()
            elif writable:
                try:
                    count = self.sock.send(rest)
                except BlockingIOError:
                    continue
                except ConnectionError:
                    self._read_rest()
                    break
                rest, end = rest[count:], monotonic() + wait_s
        return len(sent) - len(rest)

    def read_for(self, seconds: float) -> None:
        """Receives everything that arrives within ``seconds``."""
        end = monotonic() + seconds
        while not self.is_closed and (left := end - monotonic()) > 0:
            if select.select([self.sock], [], [], left)[0]:
                self._read()

    def read_some(self) -> bool:
        """Waits for more bytes; returns False if none arrive."""
        readable = select.select([self.sock], [], [], WAIT_S_MAX)[0]
        if readable:
            self._read()
        return bool(readable) and not self.is_closed

    def read_until(self, is_done: Callable[[], object], what: str) -> None:
        """Receives frames until ``is_done``, or until the server has closed."""
        end = monotonic() + WAIT_S_MAX
        while not (is_done() or self.is_closed):
            if not select.select([self.sock], [], [], max(end - monotonic(), 0))[0]:
                raise AssertionError(f"no {what}: silent, GOAWAY {self.goaway_code}")
            self._read()

    def _wait_for(self, is_done: Callable[[], object], what: str) -> None:
        self.read_until(is_done, what)
        if not is_done():
            raise AssertionError(f"no {what}: closed, GOAWAY {self.goaway_code}")

    def response(self, stream: int) -> Response:
        """Returns the response on ``stream``, once it is complete or reset."""
        found = self.responses.setdefault(stream, Response())
        self._wait_for(
            lambda: found.is_whole or found.reset_code is not None, f"answer on stream {stream}"
        )
        return found

    def body_of(self, stream: int, nbytes: int) -> bytes:
        """Returns the body received so far, once it has ``nbytes`` or more."""
        found = self.responses.setdefault(stream, Response())
        self._wait_for(lambda: len(found.body) >= nbytes, f"{nbytes} bytes on stream {stream}")
        return found.body

    def pong(self, number: int = 7) -> None:
        """Waits for the ACK of a PING: by then the server has read all bytes sent before it."""
        self.send(f.ping(number))
        ack = Frame(f.PING, f.ACK, 0, struct.pack(">Q", number))
        self._wait_for(lambda: ack in self.others, "PING's ACK")
        self.others.remove(ack)

    def ending(self) -> int | None:
        """Returns the code of the GOAWAY, once the server has closed; None if there was none."""
        self.read_until(lambda: False, "end of the connection")
        return self.goaway_code

    def close(self) -> None:
        self.sock.close()

    def _read_rest(self) -> None:
        while not self.is_closed:
            if not select.select([self.sock], [], [], WAIT_S_MAX)[0]:
                return
            self._read()

    def _read(self) -> None:
        try:
            received = self.sock.recv(READ_BYTES)
            while isinstance(self.sock, ssl.SSLSocket) and (left := self.sock.pending()):
                received += self.sock.recv(left)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except ConnectionError:
            received = b""
        if not received:
            self.is_closed = True
            return
        self._buffer += received
        for one in f.take_frames(self._buffer):
            self._take(one)

    def _take(self, one: Frame) -> None:
        if one.type in (f.HEADERS, f.CONTINUATION):
            self._block += one.payload
            if one.flags & f.END_HEADERS:
                self._take_headers(one)
        elif one.type == f.DATA:
            self.responses.setdefault(one.stream, Response()).body += one.payload
        elif one.type == f.RST_STREAM:
            response = self.responses.setdefault(one.stream, Response())
            (code,) = struct.unpack(">L", one.payload)
            # RFC 9113, 8.1: after an early response a server may send a reset with NO_ERROR, to say
            # that it reads no more of the request.
            if not (response.is_whole and code == f.NO_ERROR):
                response.reset_code = code
        elif one.type == f.GOAWAY:
            self.goaway_code = struct.unpack(">L", one.payload[4:8])[0]
        else:
            self.others.append(one)
        if one.ends_stream:
            self.responses[one.stream].is_whole = True

    def _take_headers(self, one: Frame) -> None:
        decoded = {str(name): str(value) for name, value in self._decoder.decode(self._block)}
        self._block = b""
        response = self.responses.setdefault(one.stream, Response())
        if response.headers:
            response.trailers = decoded
        else:
            response.headers = decoded
