"""TLS transport layered over the raw transport of a socket.

Output is held unencrypted and encrypted only as the socket accepts it. An unsent response is
therefore held once, and is counted as without TLS. Input is decrypted in small amounts in each
event-loop iteration.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Iterable
from typing import Any

from embedserve.access.authenticator import CERTIFICATE, ClientCertificate, certificate_of

RECORD_HEADER_BYTES = 5
"""Bytes before the content of a TLS record: type, version and length."""
RECORD_BYTES = 16 << 10
"""Bytes of the largest TLS record."""
READ_RECORDS = 8
"""Records decrypted in one event-loop iteration, also those without data. A key update takes some
20 microseconds, more than 16 KiB of data."""
WRITE_RECORDS = 16
"""Records encrypted in one event-loop iteration; takes a fraction of a millisecond."""
JOINED_BYTES_MAX = 64 << 10
"""Bytes of output up to which chunks are joined; a TLS record per chunk would cost more."""

Data = bytes | bytearray | memoryview


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """Transport for the application protocol, and protocol of the raw transport."""

    def __init__(
        self,
        raw: asyncio.Transport,
        tls: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        protocol: asyncio.BaseProtocol,
    ) -> None:
        """
        Args:
            raw: transport of the socket.
            tls: TLS object over the two BIOs, after its handshake.
            incoming: BIO of received bytes.
            outgoing: BIO of bytes to send.
            protocol: application protocol.
        """
        super().__init__()
        self._raw = raw
        self._tls = tls
        self._incoming = incoming
        self._outgoing = outgoing
        self._protocol: Any = protocol
        self._loop = asyncio.get_running_loop()
        self._encrypted = b""  # received, not decrypted yet
        self._record_left = 0  # bytes of a record whose beginning OpenSSL has
        self._is_read_due = False
        self._is_reading = True
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = 0
        self._is_raw_full = self._is_protocol_paused = False
        self._is_pump_due = False
        self._is_closing = self._has_eof = self._is_ended = False

    def begin(self, data: bytes) -> None:
        """Starts reading. Bytes behind the handshake are in the incoming BIO and then ``data``."""
        self._encrypted = self._incoming.read() + data
        self._read_soon()

    # Reading

    def data_received(self, data: bytes) -> None:
        if self._is_ended:
            self._protocol.data_received(data)  # LingeringClose, which only counts bytes
            return
        self._encrypted = self._encrypted + data if self._encrypted else data
        if self._is_reading and not self._is_read_due:
            self._read()

    def _read_soon(self) -> None:
        """Pauses the raw transport, and continues reading in the next event-loop iteration."""
        self._raw.pause_reading()
        if not self._is_read_due:
            self._is_read_due = True
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._is_read_due = False
        if self._raw.is_closing() or not self._is_reading:
            return
        if self._is_ended:
            self._raw.resume_reading()
            return
        try:
            self._read()
        except Exception:
            self.abort()  # as a transport does if data_received raises
            raise
        if not self._is_read_due and self._is_reading and not self._raw.is_closing():
            self._raw.resume_reading()

    def _read(self) -> None:
        """Decrypts some received bytes and passes them to the protocol."""
        plain, problem = self._decrypt()
        if self._outgoing.pending:
            self._raw.write(self._outgoing.read())
        if self._encrypted and self._has_input:
            self._read_soon()
        if problem is not None and not isinstance(problem, ssl.SSLZeroReturnError):
            # OpenSSL neither writes nor returns a certificate any more, so that what came before
            # the invalid record cannot be answered.
            self._is_closing = True
            self._drop_backlog()
            self._raw.close()  # the alert was written above
            return
        if plain:
            self._protocol.data_received(plain)
        if problem is None or self._raw.is_closing():
            return
        if not self._protocol.eof_received():
            self.close()

    @property
    def _has_input(self) -> bool:
        """Whether received bytes can be decrypted: the header of a record, or more of its rest."""
        return len(self._encrypted) >= (1 if self._record_left else RECORD_HEADER_BYTES)

    def _decrypt(self) -> tuple[bytes, ssl.SSLError | None]:
        """Returns (decrypted bytes, the error or end of the TLS stream, or None)."""
        chunks: list[bytes] = []
        problem = None
        try:
            self._decrypt_records(chunks)
        except ssl.SSLError as error:
            problem = error
            self._encrypted = b""
        return chunks[0] if len(chunks) == 1 else b"".join(chunks), problem

    def _decrypt_records(self, chunks: list[bytes]) -> None:
        """Decrypts up to READ_RECORDS into ``chunks``, one at a time: a BIO never shrinks.

        Raises:
            SSLError: the TLS stream has ended, or the input is invalid.
        """
        data, start, end = self._encrypted, 0, self._record_left
        for _ in range(READ_RECORDS):
            if end == start:
                if len(data) < start + RECORD_HEADER_BYTES:
                    break
                end += RECORD_HEADER_BYTES + (data[start + 3] << 8 | data[start + 4])
            self._incoming.write(data[start:end])
            try:
                chunk = self._tls.read(RECORD_BYTES)
                if not chunk:
                    raise ssl.SSLZeroReturnError
                chunks.append(chunk)
            except ssl.SSLWantReadError:  # the record is incomplete, or has no data
                pass
            start = end
            if end >= len(data):
                break
        self._record_left = max(0, end - len(data))
        self._encrypted = data[start:]

    def pause_reading(self) -> None:
        self._is_reading = False
        if not self._raw.is_closing():
            self._raw.pause_reading()

    def resume_reading(self) -> None:
        if self.is_closing():
            return
        self._is_reading = True
        if self._has_input:
            self._read_soon()
        else:
            self._raw.resume_reading()

    def eof_received(self) -> bool:
        """Closes after EOF without close_notify; safe, as HTTP messages carry their lengths."""
        return False

    # Writing

    def write(self, data: Data) -> None:
        if self._is_closing or self._has_eof or not data:
            return
        is_small = type(data) is bytes and len(data) <= RECORD_BYTES
        if self._backlog or self._is_raw_full or not is_small:
            self._append(data)
            self._pump()
            return
        self._tls.write(data)
        self._raw.write(self._outgoing.read())

    def writelines(self, list_of_data: Iterable[Data]) -> None:
        if self._is_closing or self._has_eof:
            return
        chunks = list(list_of_data)
        if sum(memoryview(chunk).nbytes for chunk in chunks) <= JOINED_BYTES_MAX:
            chunks = [b"".join(chunks)]
        for chunk in chunks:
            self._append(chunk)
        self._pump()

    def _append(self, data: Data) -> None:
        view = memoryview(data).cast("B")
        if view.nbytes:
            self._backlog.append(view)
            self._backlog_bytes += view.nbytes

    def _pump(self) -> None:
        """Encrypts WRITE_RECORDS while the socket has room.

        The rest follows in later event-loop iterations, or when the socket has drained.
        """
        if self._backlog and not self._is_raw_full and not self._is_pump_due:
            self._raw.write(b"".join(self._encrypt()))
            if self._backlog and not self._is_raw_full:
                self._is_pump_due = True
                self._loop.call_soon(self._pump_on)
        self._end_if_due()
        self._update_backpressure()

    def _update_backpressure(self) -> None:
        """Calls pause_writing or resume_writing of the protocol if the backpressure changed."""
        is_full = bool(self._backlog) or self._is_raw_full
        if is_full != self._is_protocol_paused:
            self._is_protocol_paused = is_full
            if is_full:
                self._protocol.pause_writing()
            else:
                self._protocol.resume_writing()

    def _pump_on(self) -> None:
        self._is_pump_due = False
        if not self._raw.is_closing():
            self._pump()

    def _encrypt(self) -> list[bytes]:
        """Encrypts up to WRITE_RECORDS of the backlog.

        Each record is read from the BIO separately, because a BIO never shrinks its buffer.
        """
        backlog = self._backlog
        records: list[bytes] = []
        while backlog and len(records) < WRITE_RECORDS:
            view = backlog[0]
            count = self._tls.write(view[:RECORD_BYTES])
            records.append(self._outgoing.read())
            if count == view.nbytes:
                backlog.popleft()
            else:
                backlog[0] = view[count:]
            self._backlog_bytes -= count
        return records

    def pause_writing(self) -> None:
        self._is_raw_full = True
        self._update_backpressure()

    def resume_writing(self) -> None:
        self._is_raw_full = False
        self._pump()

    def get_write_buffer_size(self) -> int:
        return self._backlog_bytes + self._raw.get_write_buffer_size()

    # Ends

    def write_eof(self) -> None:
        """Closes the sending side after all is written; later input is passed on undecrypted."""
        self._has_eof = True
        self._end_if_due()

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._is_reading = False
        if self._raw.is_closing():
            return
        self._raw.pause_reading()
        self._end_if_due()

    def _end_if_due(self) -> None:
        if self._backlog or self._raw.is_closing() or not (self._is_closing or self._has_eof):
            return
        if not self._is_ended:
            self._is_ended = True
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()  # raises, as the client's close_notify is missing
            self._raw.write(self._outgoing.read())
            self._encrypted = b""
            if self._has_eof:
                self._raw.write_eof()
        if self._is_closing:
            self._raw.close()

    def _drop_backlog(self) -> None:
        self._backlog.clear()
        self._backlog_bytes = 0

    def abort(self) -> None:
        self._is_closing = True
        self._drop_backlog()
        self._encrypted = b""
        self._raw.abort()

    def is_closing(self) -> bool:
        return self._is_closing or self._raw.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._drop_backlog()
        self._encrypted = b""
        self._protocol.connection_lost(exc)

    # Protocol and extra information

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        found: asyncio.BaseProtocol = self._protocol
        return found

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._tls
        if name == "sslcontext":
            return self._tls.context
        if name == CERTIFICATE:
            return _certificate_of(self._tls)
        return self._raw.get_extra_info(name, default)


def _certificate_of(tls: ssl.SSLObject) -> ClientCertificate | None:
    """Returns the client certificate that TLS has verified; None if there was none."""
    found = tls.getpeercert()
    if not found:
        return None
    return certificate_of(found, ssl.cert_time_to_seconds(str(found["notAfter"])))
