"""One gRPC call over ASGI: its metadata, its messages in, its messages and status out.

Knows HTTP and gRPC's framing, not what the messages say. Whoever holds a call sends either answer()
or any number of write() and then end().
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from time import perf_counter
from typing import Any

import grpc

from embedserve.frontends.grpc_wire import (
    ENCODINGS,
    Deframer,
    WireError,
    framed,
    only_message,
    percent_encoded,
    timeout_s,
)

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

CONTENT_TYPE = (b"content-type", b"application/grpc")
HEADERS = [CONTENT_TYPE, (b"grpc-accept-encoding", ENCODINGS)]
START: Event = {
    "type": "http.response.start",
    "status": 200,
    "headers": HEADERS,
    "trailers": True,
}
END_BODY: Event = {"type": "http.response.body", "body": b""}
OK_TRAILERS: Event = {"type": "http.response.trailers", "headers": [(b"grpc-status", b"0")]}
READ_AHEAD_BYTES_MAX = 1 << 20
"""Of a stream's whole messages that nobody has asked for yet; more are left to flow control."""


class ClientGoneError(Exception):
    """The client cancelled the call, or its connection ended."""


class Call:
    """A call that has begun.

    Attributes:
        is_grpc: its content type is gRPC's.
        timeout_s: how long its client waits, from the call's begin; None: for ever.
        is_read: the client has sent all.
    """

    __slots__ = (
        "_encoding",
        "_has_started",
        "_receive",
        "_send",
        "_start_s",
        "is_grpc",
        "is_read",
        "timeout_s",
    )

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._start_s = perf_counter()
        self._encoding = b"identity"
        self._has_started = False
        self.is_grpc = False
        self.is_read = False
        self.timeout_s: float | None = None

    def read_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises WireError: one of them is not as gRPC has it."""
        for name, value in headers:
            if name == b"content-type":
                self.is_grpc = value == b"application/grpc" or value.startswith(
                    (b"application/grpc+", b"application/grpc;")
                )
            elif name == b"grpc-timeout":
                self.timeout_s = timeout_s(value)
            elif name == b"grpc-encoding":
                self._encoding = value

    def time_remaining(self) -> float | None:
        """Seconds until its client gives up."""
        if self.timeout_s is None:
            return None
        return self.timeout_s - (perf_counter() - self._start_s)

    async def receive(self) -> bytes:
        """The next piece of its body; empty ones follow the last.

        Raises:
            ClientGoneError: there is nobody to answer any more.
        """
        event = await self._receive()
        if event["type"] != "http.request":
            raise ClientGoneError
        if not event.get("more_body", False):
            self.is_read = True
        body: bytes = event.get("body", b"")
        return body

    async def message(self, bytes_max: int) -> bytes:
        """The only message of a call that has one; as in grpcio, what follows is not looked at.

        Raises:
            WireError: there is none, or it is too large, or not framed or compressed rightly.
            ClientGoneError: the call ended before.
        """
        piece = await self.receive()
        if self._encoding == b"identity" and (whole := only_message(piece, bytes_max)) is not None:
            return whole
        deframer = Deframer(bytes_max, self._encoding)
        deframer.feed(piece)
        while (message := deframer.next_message()) is None:
            if self.is_read:
                deframer.check_end()
                raise WireError("UNIMPLEMENTED", "the method requires exactly one message")
            deframer.feed(await self.receive())
        return message

    def deframer(self, bytes_max: int) -> Deframer:
        return Deframer(bytes_max, self._encoding)

    def answer(self, body: bytes) -> None:
        """Sends the only message, framed, and the status OK.

        Raises:
            ClientGoneError: there is nobody to answer any more.
        """
        self._send_now(START)
        self._send_now({"type": "http.response.body", "body": body})
        self._send_now(OK_TRAILERS)

    async def write(self, body: bytes) -> None:
        """Sends framed messages of a stream; returns when the connection has room for more."""
        if not self._has_started:
            self._has_started = True
            await self._sent(START)
        await self._sent({"type": "http.response.body", "body": body, "more_body": True})

    def end(
        self,
        code: grpc.StatusCode = grpc.StatusCode.OK,
        message: str = "",
        metadata: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Ends the call with a status; ``metadata`` trails.

        Raises:
            ClientGoneError: there is nobody to tell any more.
        """
        trailers = [(b"grpc-status", b"%d" % code.value[0])]
        if message:
            trailers.append((b"grpc-message", percent_encoded(message)))
        trailers += [(name.encode(), value.encode()) for name, value in metadata]
        if self._has_started:
            self._send_now(END_BODY)
            self._send_now({"type": "http.response.trailers", "headers": trailers})
            return
        self._send_now({**START, "headers": HEADERS + trailers, "trailers": False})
        self._send_now(END_BODY)

    def refuse(self, http_status: int) -> None:
        """Answers what is no gRPC."""
        self._send_now({"type": "http.response.start", "status": http_status, "headers": []})
        self._send_now(END_BODY)

    def _send_now(self, event: Event) -> None:
        """Sends what ends an answer, for which an ASGI server has nothing to wait for."""
        try:
            next(self._send(event).__await__())
        except StopIteration:
            return
        except OSError as error:  # as ASGI has it
            raise ClientGoneError from error
        raise RuntimeError(f"send() of {event['type']} did not return at once")

    async def _sent(self, event: Event) -> None:
        try:
            await self._send(event)
        except OSError as error:  # as ASGI has it
            raise ClientGoneError from error


class Incoming:
    """The messages of a stream, which a task of its own reads ahead.

    Reading ahead tells at once when the client goes away, also while nobody asks for messages.
    """

    def __init__(self, call: Call, bytes_max: int) -> None:
        """Raises WireError: the messages are encoded in an unknown way."""
        self._call = call
        self._deframer = call.deframer(bytes_max)
        self._is_wanted = False
        self._changed = asyncio.Event()

    async def read_ahead(self) -> None:
        """Reads to the end. Raises ClientGoneError."""
        while not self._call.is_read:
            self._deframer.feed(await self._call.receive())
            self._changed.set()
            while self._deframer.nbytes > READ_AHEAD_BYTES_MAX and not self._is_wanted:
                self._changed.clear()
                await self._changed.wait()
            self._is_wanted = False

    async def messages(self) -> AsyncIterator[bytes]:
        """Raises WireError: the client's bytes are not messages."""
        while True:
            while (message := self._deframer.next_message()) is not None:
                yield message
            if self._call.is_read:
                self._deframer.check_end()
                return
            self._is_wanted = True
            self._changed.set()
            self._changed.clear()
            await self._changed.wait()


async def write_each(call: Call, answers: AsyncIterator[bytes]) -> None:
    async for answer in answers:
        await call.write(framed(answer))
