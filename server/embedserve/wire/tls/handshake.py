"""Connections in a TLS handshake, which count and time out like other connections.

The cost of a handshake is a signature of up to a millisecond. Handshakes run one at a time in a
thread, so that a burst of them does not delay requests on established connections.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TYPE_CHECKING, cast

from embedserve.codec.json_codec import encode_error
from embedserve.errors import InvalidRequestError
from embedserve.metrics.rate_limited_logger import RateLimitedLogger
from embedserve.metrics.tls import TlsMetrics
from embedserve.wire.connections import DRAIN_IDLE_S, Connection, LingeringClose, ProtocolDetector
from embedserve.wire.tls.certificates import advance
from embedserve.wire.tls.transport import TlsTransport

if TYPE_CHECKING:
    from embedserve.wire.wire_server import WireServer

HANDSHAKE_S_MAX = 10.0
"""Seconds that a handshake may take."""
HANDSHAKE_BYTES_MAX = 128 << 10
"""Bytes that a client may send in a handshake; most of them are its certificates."""
HANDSHAKE_MEMORY_BYTES = 48 << 10
"""Approximate bytes of memory per handshake in progress, without the received bytes."""
HANDSHAKE_RECORD = 0x16
PLAIN_HTTP = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"


class Handshakes:
    """Shared state of a server's handshakes.

    Attributes:
        counts: handshakes by outcome.
        thread: executor with one thread, which runs all handshakes.
        log: rate-limited log of failed handshakes.
    """

    def __init__(self, logger: logging.Logger, metrics: TlsMetrics) -> None:
        self.counts = metrics.handshakes
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="tls")
        self.log = RateLimitedLogger(logger)


class Handshake(Connection):
    """A connection in its handshake, as protocol of the raw transport.

    After the handshake a TlsTransport replaces it, with a ProtocolDetector.
    """

    def __init__(self, server: WireServer, handshakes: Handshakes, context: ssl.SSLContext) -> None:
        self._server = server
        self._handshakes = handshakes
        self._context = context
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object: ssl.SSLObject | None = None
        self._pending = b""  # received while the thread was busy
        self._received_bytes = 0
        self._is_stepping = self._is_over = False
        self._start_s = perf_counter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not of that class
        if not self._server.has_room():
            self._is_over = True
            self._transport.abort()
            return
        self._server.add(self)

    def data_received(self, data: bytes) -> None:
        if self._object is None:
            if data[0] != HANDSHAKE_RECORD:
                self._reject_plaintext(data)
                return
            self._object = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._received_bytes += len(data)
        if self._received_bytes > HANDSHAKE_BYTES_MAX:
            self._fail("too_large", f"over {HANDSHAKE_BYTES_MAX} bytes were received of it")
            self._transport.abort()
            return
        self._pending += data
        if not self._is_stepping:
            self._step()

    def _step(self) -> None:
        """Continues the handshake in the thread with the received bytes.

        Only the thread uses the BIOs until it is done.
        """
        assert self._object is not None
        self._incoming.write(self._pending)
        self._pending = b""
        self._is_stepping = True
        self._transport.pause_reading()
        loop = asyncio.get_running_loop()
        stepped = loop.run_in_executor(self._handshakes.thread, self._do_handshake, self._object)
        stepped.add_done_callback(self._stepped)

    def _do_handshake(self, one: ssl.SSLObject) -> bool:
        """Runs a step of the handshake in the thread. Returns whether the handshake is complete."""
        return not self._is_over and advance(one)

    def _stepped(self, stepped: asyncio.Future[bool]) -> None:
        self._is_stepping = False
        error = stepped.exception()
        if self._is_over or self._transport.is_closing():
            return
        if out := self._outgoing.read():
            self._transport.write(out)  # on failure, too: an alert with the reason
        if error is not None:
            self._fail(_outcome(error), _reason(error))
            LingeringClose(self._transport, self, self._server)
        elif stepped.result():
            self._finish()
        elif self._pending:
            self._step()
        else:
            self._transport.resume_reading()

    def _finish(self) -> None:
        assert self._object is not None
        self._end("ok")
        inner = ProtocolDetector(self._server)
        transport = TlsTransport(
            self._transport, self._object, self._incoming, self._outgoing, inner
        )
        self._transport.set_protocol(transport)
        self._server.discard(self)
        inner.connection_made(transport)
        if not self._transport.is_closing():
            transport.begin(self._pending)

    def _reject_plaintext(self, data: bytes) -> None:
        """Rejects a plaintext connection: HTTP/1 gets an error response, others are only closed."""
        self._fail("no_tls", "what came is no TLS")
        if b" HTTP/1." in data.partition(b"\r\n")[0]:
            problem = "this port takes TLS only: use https://"
            body = encode_error(InvalidRequestError(problem))
            self._transport.write(PLAIN_HTTP + b"content-length: %d\r\n\r\n" % len(body) + body)
        LingeringClose(self._transport, self, self._server)

    def _end(self, outcome: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._handshakes.counts[outcome] += 1

    def _fail(self, outcome: str, why: str) -> None:
        self._end(outcome)
        self._handshakes.log.log(
            logging.INFO,
            "a TLS handshake failed",
            why,
            fields=lambda: {"address": self.peer},
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("gone")
        self._server.discard(self)

    @property
    def held_bytes(self) -> int:
        return HANDSHAKE_MEMORY_BYTES + self._received_bytes + len(self._pending)

    def check_time(self, now_s: float) -> None:
        if now_s - self._start_s > HANDSHAKE_S_MAX:
            self._fail("too_late", f"it took over {HANDSHAKE_S_MAX:g} s")
            self._transport.abort()

    def drain(self) -> None:
        asyncio.get_running_loop().call_later(DRAIN_IDLE_S, self._close_if_new)

    def _close_if_new(self) -> None:
        if not self._is_over:
            self.abort()

    def abort(self) -> None:
        self._end("gone")
        self._transport.abort()


def _outcome(error: BaseException) -> str:
    is_missing = getattr(error, "reason", None) == "PEER_DID_NOT_RETURN_A_CERTIFICATE"
    is_certificate = is_missing or isinstance(error, ssl.SSLCertVerificationError)
    return "certificate" if is_certificate else "failed"


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return str(error)
