"""An embed request that has a stream of HTTP/2 for itself, of gRPC or REST."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from time import perf_counter

from embedserve.access.access import Certificate
from embedserve.errors import EmbedServeError, OverloadedError
from embedserve.exchange import REQUEST_S_MAX, Asked, Call, Exchange, late_request
from embedserve.tracing.request_id import Told
from embedserve.wire.http2.stream import Stream

LATE_STREAMS_MAX = 16
"""Of a connection whose refusals wait."""


class StreamCall(Call):
    """The handler of its stream; subclasses read the request and write its answer."""

    __slots__ = ("_headers", "_stream")

    def __init__(
        self, asked: Asked, exchange: Exchange, headers: Mapping[bytes, bytes], stream: Stream
    ) -> None:
        super().__init__(asked, perf_counter(), exchange)
        self._headers = headers
        self._stream = stream

    @property
    def origin(self) -> object:
        return self._stream.connection

    @property
    def certificate(self) -> Certificate | None:
        return self._stream.connection.certificate

    @property
    def peer(self) -> str:
        return self._stream.connection.peer

    @property
    def may_be_late(self) -> bool:
        """Others may share the connection, which has but so many streams."""
        return len(self._stream.connection.streams) <= LATE_STREAMS_MAX

    def header(self, name: bytes) -> bytes | None:
        return self._headers.get(name)

    @abstractmethod
    def end(self, error: EmbedServeError, told: Told) -> None:
        """Ends the stream with ``error``, and what is ``told`` of its request."""

    def write_error(self, error: EmbedServeError, told: Told) -> None:
        if isinstance(error, OverloadedError):
            self._stream.keep_bodies_back()
        self.end(error, told)

    def reset(self) -> None:
        self.cancel()

    def resume(self) -> None:
        """The whole answer is written at once: there is no more."""

    def check_time(self, now_s: float) -> None:
        if not self._stream.is_received and now_s - self.start_s > REQUEST_S_MAX:
            self.refuse(late_request())

    def drain(self) -> None:
        """It was accepted, so it is answered."""
