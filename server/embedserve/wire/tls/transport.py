"""A connection over TLS as a transport over the transport of its socket.

Holds what is to be written as it was given, and encrypts it only as the socket takes it, so that
an answer that nobody reads is kept once and counted as without TLS. Decrypts a little in each turn
of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Iterable
from typing import Any

from embedserve.access.authenticator import CERTIFICATE, Certificate, certificate_of

PIECE_BYTES = 16 << 10
"""Decrypted at once: a client may send many records in it that hold nothing."""
RECORD_BYTES = 16 << 10
READ_RECORDS = 8
"""Decrypted in a turn of the event loop, or twice as many where they are small."""
WRITE_RECORDS = 16
"""Encrypted in a turn: a fraction of a millisecond."""
JOINED_BYTES_MAX = 64 << 10
"""Pieces of no more bytes are encrypted as one: a record of its own for each would cost more."""

Data = bytes | bytearray | memoryview


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """A transport to the protocol inside, and a protocol to the raw transport."""

    def __init__(
        self,
        raw: asyncio.Transport,
        tls: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        protocol: asyncio.BaseProtocol,
    ) -> None:
        """``tls``, over the two BIOs, has done its handshake."""
        super().__init__()
        self._raw = raw
        self._tls = tls
        self._incoming = incoming
        self._outgoing = outgoing
        self._protocol: Any = protocol
        self._loop = asyncio.get_running_loop()
        self._encrypted = b""  # that came and is not read
        self._is_read_due = False
        self._has_left = False  # of what the BIO was given
        self._is_reading = True
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = 0
        self._is_raw_full = self._is_told_full = False
        self._is_pump_due = False
        self._is_closing = self._has_eof = self._is_ended = False

    def begin(self, data: bytes) -> None:
        """Reads what came with the handshake's end, in the BIO and in ``data`` behind it."""
        self._encrypted = data
        self._has_left = True
        self._read_soon()

    # Reading

    def data_received(self, data: bytes) -> None:
        if self._is_ended:
            self._protocol.data_received(data)  # which only counts what comes after our end
            return
        self._encrypted = self._encrypted + data if self._encrypted else data
        if self._is_reading and not self._is_read_due:
            self._read()

    def _read_soon(self) -> None:
        """Reads on once others had their turn; until then nothing more comes."""
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
            self.abort()  # as a transport does where data_received raises
            raise
        if not self._is_read_due and self._is_reading and not self._raw.is_closing():
            self._raw.resume_reading()

    def _read(self) -> None:
        """Decrypts some of what came, and hands it on."""
        plain, problem = self._decrypt()
        if self._outgoing.pending:
            self._raw.write(self._outgoing.read())
        if self._has_left or self._encrypted:
            self._read_soon()
        if plain:
            self._protocol.data_received(plain)
        if problem is None or self._raw.is_closing():
            return
        if not isinstance(problem, ssl.SSLZeroReturnError):
            self._is_closing = True
            self._raw.close()  # the client was told what is wrong
        elif not self._protocol.eof_received():
            self.close()

    def _decrypt(self) -> tuple[bytes, ssl.SSLError | None]:
        """(what was decrypted, why there is no more)"""
        parts: list[bytes] = []
        problem = None
        try:
            is_on = True
            while is_on:
                is_on = self._decrypt_piece(parts)
        except ssl.SSLError as error:
            problem = error
            self._has_left, self._encrypted = False, b""
        return parts[0] if len(parts) == 1 else b"".join(parts), problem

    def _decrypt_piece(self, parts: list[bytes]) -> bool:
        """Adds to ``parts`` what a piece holds; False where it is others' turn, or none is left.

        Raises:
            SSLError: there is no more, or what came is no TLS.
        """
        incoming = self._incoming
        if not self._has_left:
            encrypted = self._encrypted
            incoming.write(encrypted[:PIECE_BYTES])
            self._encrypted = encrypted[PIECE_BYTES:]
        has_plain = False
        try:
            while True:
                part = self._tls.read(RECORD_BYTES)
                if not part:
                    raise ssl.SSLZeroReturnError
                parts.append(part)
                has_plain = True
                if not incoming.pending:  # to read on would only raise
                    break
                if len(parts) >= READ_RECORDS:
                    self._has_left = True
                    return False
        except ssl.SSLWantReadError:
            pass
        self._has_left = False
        return has_plain and bool(self._encrypted) and len(parts) < READ_RECORDS

    def pause_reading(self) -> None:
        self._is_reading = False
        if not self._raw.is_closing():
            self._raw.pause_reading()

    def resume_reading(self) -> None:
        if self.is_closing():
            return
        self._is_reading = True
        if self._encrypted or self._has_left:
            self._read_soon()
        else:
            self._raw.resume_reading()

    def is_reading(self) -> bool:
        return self._is_reading

    def eof_received(self) -> bool:
        """The client ended without saying so: what it sent has lengths of its own."""
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
        parts = list(list_of_data)
        if sum(memoryview(part).nbytes for part in parts) <= JOINED_BYTES_MAX:
            parts = [b"".join(parts)]
        for part in parts:
            self._append(part)
        self._pump()

    def _append(self, data: Data) -> None:
        view = memoryview(data).cast("B")
        if view.nbytes:
            self._backlog.append(view)
            self._backlog_bytes += view.nbytes

    def _pump(self) -> None:
        """Encrypts what the socket has room for; the rest as it drains, or soon."""
        if self._backlog and not self._is_raw_full and not self._is_pump_due:
            self._raw.write(b"".join(self._encrypt()))
            if self._backlog and not self._is_raw_full:
                self._is_pump_due = True
                self._loop.call_soon(self._pump_on)
        if not self._backlog:
            self._end_if_due()
        self._tell()

    def _tell(self) -> None:
        """Tells the protocol whether there is room for more."""
        is_full = bool(self._backlog) or self._is_raw_full
        if is_full != self._is_told_full:
            self._is_told_full = is_full
            if is_full:
                self._protocol.pause_writing()
            else:
                self._protocol.resume_writing()

    def _pump_on(self) -> None:
        self._is_pump_due = False
        if not self._raw.is_closing():
            self._pump()

    def _encrypt(self) -> list[bytes]:
        """Some of the backlog, each record by itself: a BIO keeps what it once had room for."""
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
        self._tell()

    def resume_writing(self) -> None:
        self._is_raw_full = False
        self._pump()

    def get_write_buffer_size(self) -> int:
        return self._backlog_bytes + self._raw.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._raw.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high, low)

    # Ends

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Ends our side once all is written; what still comes is then handed on as it is."""
        self._has_eof = True
        if not self._backlog:
            self._end_if_due()

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._is_reading = False
        if self._raw.is_closing():
            return
        self._raw.pause_reading()
        if not self._backlog:
            self._end_if_due()

    def _end_if_due(self) -> None:
        if self._raw.is_closing() or not (self._is_closing or self._has_eof):
            return
        if not self._is_ended:
            self._is_ended = True
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()  # which waits for the client's end; ours is made
            self._raw.write(self._outgoing.read())
            self._has_left, self._encrypted = False, b""
            if self._has_eof:
                self._raw.write_eof()
        if self._is_closing:
            self._raw.close()

    def abort(self) -> None:
        self._is_closing = True
        self._backlog.clear()
        self._backlog_bytes = 0
        self._encrypted = b""
        self._raw.abort()

    def is_closing(self) -> bool:
        return self._is_closing or self._raw.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._backlog.clear()
        self._backlog_bytes = 0
        self._encrypted = b""
        self._protocol.connection_lost(exc)

    # What it is

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


def _certificate_of(tls: ssl.SSLObject) -> Certificate | None:
    """That the client has shown, and TLS has found right."""
    found = tls.getpeercert()
    if not found:
        return None
    return certificate_of(found, ssl.cert_time_to_seconds(str(found["notAfter"])))
