"""The exchange: what happens between a protocol's bytes and its bytes, once for all of them.

Admits a request, has a codec decode it, queues it with its model, and when its vectors come has
them encoded, counts, and hands the bytes to whoever asked. A protocol is a small adapter: it makes
a Call of its own kind for each request and writes what the call is given. It never sees ids.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Protocol

from embedserve.access.access import Access, Certificate
from embedserve.access.client_address import ClientAddresses
from embedserve.aside import Aside
from embedserve.batching.split import own
from embedserve.codec.codec import Codec, Decode, DecodeNow
from embedserve.errors import (
    INTERNAL,
    DeadlineExceededError,
    EmbedServeError,
    EngineError,
    ServedVersion,
)
from embedserve.metrics.metrics import Metrics, ProtocolMetrics
from embedserve.metrics.quiet_log import QuietLog
from embedserve.models.served_models import ServedModels
from embedserve.shared_memory.regions import EVERYBODY, NONE, SharedMemory
from embedserve.tracing.observed import ObservedCaller
from embedserve.tracing.observer import Observer
from embedserve.tracing.request_id import Told
from embedserve.types import Encoded, LookupRequest, LookupResult, Parts, with_size

logger = logging.getLogger(__name__)

REQUEST_S_MAX = 30.0
"""How long the body of one request may take to come."""
_NEVER = float("inf")
LARGE_ANSWER_BYTES = 64 << 10
"""Told to who looks after what is not read; smaller ones find room in a socket."""
ROUTING_KEY = b"x-routing-key"
"""The header of who is to be answered by the same version each time, where several share."""
ORIGIN = b"origin"
"""The header that browsers send with what a page asks of another site."""
TURN_S = 0.0001
"""Left to the event loop between two pieces of a large answer: it would wait for the interpreter's
lock for five milliseconds each time it needs it."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What the head of a request asks for; requests with the same head share it.

    Attributes:
        model: of the URL; "" for what the body names, or the default model.
        codec: of the body.
        answer_codec: of the answer.
        timeout_s: how long the answer is wanted, from the request's first byte; None: for ever.
        metrics: of the protocol.
        has_id: it has an X-Request-Id, which its answer repeats.
    """

    model: str
    codec: Codec
    answer_codec: Codec
    timeout_s: float | None
    metrics: ProtocolMetrics
    has_id: bool = False

    def in_codec(self, codec: Codec) -> Asked:
        """The same in another form."""
        return replace(self, codec=codec, answer_codec=codec)


class Call(ObservedCaller):
    """One request, from its first byte until its answer is written; counted once.

    A protocol's adapter says how an answer and a refusal are written.

    Attributes:
        asked: what its head says.
        exchange: that it is asked of.
    """

    __slots__ = ("asked", "exchange")
    asked: Asked

    def __init__(self, asked: Asked, start_s: float, exchange: Exchange) -> None:
        self.asked = asked
        self.exchange = exchange
        self.start_s = start_s
        self.client = None
        self.is_waiting = True
        self.queue = None
        timeout_s = asked.timeout_s
        self.deadline_s = _NEVER if timeout_s is None else start_s + timeout_s

    @property
    def source(self) -> object:
        return self.client or self.origin

    @property
    def origin(self) -> object:
        """Where it comes from, such as its connection, which tells callers apart that have no
        names."""
        return self

    @property
    def owner(self) -> str:
        """The name that it asks by, of whom its regions of shared memory are."""
        client = self.client
        return EVERYBODY if client is None else client.grant.name

    @property
    def certificate(self) -> Certificate | None:
        """That the client has shown."""
        return None

    @property
    def peer(self) -> str:
        """The address of the other end of its connection."""
        return ""

    @property
    def address(self) -> str:
        return self.exchange.addresses.find(self.peer, self.header)

    @property
    def may_be_late(self) -> bool:
        """Whether its refusal may wait, and keep nobody but its client waiting."""
        return True

    @abstractmethod
    def write_answer(self, parts: Parts, nbytes: int, told: Told | None = None) -> None:
        """Writes the encoded answer, ``nbytes`` in all, and what is ``told`` of its request."""

    @abstractmethod
    def write_error(self, error: EmbedServeError, told: Told) -> None:
        """Writes why there is no answer, in the protocol's form."""

    def was_queued(self) -> None:
        """Told of a request that took long to decode, once it waits in its queue; of any other that
        is so when it was asked."""

    @property
    def routing_key(self) -> bytes:
        return self.header(ROUTING_KEY) or b""

    def answer(self, result: LookupResult) -> None:
        try:
            encoded = self.asked.answer_codec.encode_now(result)
            if encoded is None:
                self.exchange.encode_later(self, result)
            else:
                self.write(*encoded)
        except EmbedServeError as error:
            self.refuse(error)
        except Exception:
            self.fail()

    def write(self, parts: Parts, nbytes: int) -> None:
        """Writes the encoded answer, and counts it."""
        self.is_waiting = False
        encoded_s = perf_counter()
        seconds = encoded_s - self.start_s
        asked, observer = self.asked, self.exchange.observer
        if seconds >= observer.watched_s or nbytes > LARGE_ANSWER_BYTES:
            self._write_observed(parts, nbytes, encoded_s)
        else:
            client = self.client
            if client is not None:
                client.active -= 1
                client.answered += 1
                self.client = None
            self.write_answer(parts, nbytes, observer.id_told(self) if asked.has_id else None)
        asked.metrics.answered(seconds, nbytes)
        self.taken.answered(seconds)

    def _write_observed(self, parts: Parts, nbytes: int, encoded_s: float) -> None:
        """As write, of a request of which there may be something to tell."""
        observer, seen = self.exchange.observer, self.seen("OK", encoded_s)
        self.leave("OK")
        self.write_answer(parts, nbytes, observer.told(self, encoded_s))
        if nbytes > LARGE_ANSWER_BYTES:
            self.exchange.wrote_large_answer(nbytes)
        end_s = perf_counter()
        observer.ended(self, end_s - self.start_s, partial(seen, end_s))

    def refuse(self, error: EmbedServeError) -> None:
        write = partial(self.write_error, error)
        self.refuse_as(error.code, error.message, write, error.model)

    def refuse_as(
        self,
        outcome: str,
        message: str,
        write: Callable[[Told], None],
        model: ServedVersion | None = None,
    ) -> None:
        """Ends as ``outcome``, which ``write`` tells the client; ``model`` rejected the request."""
        self.is_waiting = False
        end_s = perf_counter()
        self.exchange.metrics.ended(self.version or model, outcome, end_s - self.start_s)
        observer = self.exchange.observer
        seen = observer.traced(self, partial(self.seen(outcome), end_s))
        self.leave(outcome)
        self.asked.metrics.refused(outcome, message, end_s - self.start_s, lambda: seen().fields())
        write(observer.told_of_error(self, end_s))

    def deny(self, error: EmbedServeError, wait_s: float) -> None:
        """Refuses what has not been asked, now or in ``wait_s``."""
        if wait_s:
            asyncio.get_running_loop().call_later(wait_s, self._refuse_if_waiting, error)
        else:
            self.refuse(error)

    def _refuse_if_waiting(self, error: EmbedServeError) -> None:
        if self.is_waiting:
            self.refuse(error)

    def fail(self) -> None:
        """Refuses for the error that is being handled, which nobody foresaw."""
        log, named = self.asked.metrics.log, lambda: {"request_id": self.request_id.decode()}
        log.say(logging.ERROR, "a request failed", with_traceback=True, fields=named)
        self.refuse(EngineError(INTERNAL))

    def cancel(self) -> None:
        """The client went away: its request leaves the queue, and nothing is written."""
        if self.is_waiting:
            end_s = perf_counter()
            seconds = end_s - self.start_s
            seen = partial(self.seen("CANCELLED"), end_s)
            self.exchange.observer.ended(self, seconds, seen)
            self.exchange.metrics.ended(self.version, "CANCELLED", seconds)
            self.go_away()
            self.leave("CANCELLED")
            self.asked.metrics.cancelled(seconds)


class Writer(Protocol):
    """What collects answers, to write them out together."""

    def flush(self) -> None: ...


class Exchange:
    """The one way from bytes to a batch and back, of a whole process.

    Attributes:
        models: what is served.
        metrics: of the process; by protocol in ``metrics.protocols``.
        access: who may ask; None: everybody.
        observer: tells where the time of requests went.
        shared_memory: in which tensors may lie; None: there is none.
        addresses: finds the addresses of clients.
    """

    def __init__(
        self,
        models: ServedModels,
        metrics: Metrics,
        access: Access | None = None,
        observer: Observer | None = None,
        shared_memory: SharedMemory | None = None,
        addresses: ClientAddresses | None = None,
    ) -> None:
        self.addresses = addresses or ClientAddresses()
        self.models = models
        self.access = access
        self.shared_memory = shared_memory
        self.metrics = metrics
        self.observer = observer or Observer()
        self._on_large_answer: list[Callable[[int], None]] = []
        self.limits = models.limits
        self._aside = Aside()
        self._log = QuietLog(logger)
        self._unflushed: list[Writer] = []
        self._on_room: list[Callable[[], None]] = []
        models.call_back(self.flush, self._has_room)

    def ask(self, call: Call, body: bytes) -> None:
        """Has ``call`` answered, refused or failed; now or when its batch ends. Never raises."""
        asked = call.asked
        try:
            if self.models.is_full:
                self.models.check_open(asked.model, body, asked.codec, is_quick=True)
            if call.deadline_s != _NEVER:
                _check_deadline(call)
            if self.shared_memory is None:
                request = asked.codec.decode_now(body, asked.model, self.limits)
            else:
                request = self._decoders(call)[0](body, asked.model, self.limits)
            if request is None:
                self._decode_later(call, body)
            else:
                client = call.client
                if client is not None and client.models is not None:
                    client.check_model(request.model, self.models.default_model)
                self.models.enqueue(request, call)
        except EmbedServeError as error:
            call.refuse(error)
        except Exception:
            call.fail()

    def _decode_later(self, call: Call, body: bytes) -> None:
        asked = call.asked
        _, decode_whole = self._decoders(call)

        def decode() -> LookupRequest:
            if self.models.is_full:  # since it waits
                self.models.check_open(asked.model, body, asked.codec)
            return decode_whole(body, asked.model, self.limits)

        def enqueue(request: LookupRequest) -> None:
            if call.client is not None:
                call.client.check_model(request.model, self.models.default_model)
            self.models.enqueue(request, call)
            call.was_queued()

        self._aside.do(call, "body", len(body), decode, enqueue)

    def _decoders(self, call: Call) -> tuple[DecodeNow, Decode]:
        """Of its body. What it says to lie in shared memory is looked for in its owner's regions; a
        page of any site, which a browser shows, has none."""
        codec, shared = call.asked.codec, self.shared_memory
        if shared is None or codec.in_regions is None:
            return codec.decode_now, codec.decode
        is_page = call.header(ORIGIN) is not None
        return codec.in_regions(NONE if is_page else shared.of(call.owner))

    def encode_later(self, call: Call, result: LookupResult) -> None:
        """Has ``call`` told the encoded ``result``, which takes long to encode.

        Raises:
            OverloadedError: too much waits for that already.
        """
        result.values = own(result.values)
        result.more = [own(piece) for piece in result.more]
        nbytes = result.values.nbytes + sum(piece.nbytes for piece in result.more)
        encode = partial(_encode, call, result)
        self._aside.do(call, "answer", nbytes, encode, lambda encoded: call.write(*encoded))

    def refuse_early(self, call: Call) -> None:
        """Refuses ``call`` before its body has come if its queue is full; for while one is."""
        try:
            self.models.check_any_open(call.asked.model)
        except EmbedServeError as error:
            call.refuse(error)

    def flush_later(self, writer: Writer) -> None:
        """Has ``writer`` flushed once the batch that is being answered has ended, or soon."""
        if not self._unflushed:
            asyncio.get_running_loop().call_soon(self.flush)
        self._unflushed.append(writer)

    def flush(self) -> None:
        """Writes out what was answered."""
        writers, self._unflushed = self._unflushed, []
        for writer in writers:
            try:
                writer.flush()
            except Exception:
                # The others' answers go out all the same.
                self._log.say(logging.ERROR, "an answer could not be written", with_traceback=True)

    def when_room(self, callback: Callable[[], None]) -> None:
        """Has ``callback`` called whenever a queue that was full takes requests again."""
        self._on_room.append(callback)

    def when_large_answer(self, callback: Callable[[int], None]) -> None:
        """Has ``callback`` told the bytes of each large answer that was written."""
        self._on_large_answer.append(callback)

    def wrote_large_answer(self, nbytes: int) -> None:
        for callback in self._on_large_answer:
            callback(nbytes)

    def _has_room(self) -> None:
        for callback in self._on_room:
            callback()


def late_request() -> DeadlineExceededError:
    """What is said of a request whose body did not come."""
    return DeadlineExceededError(f"the request had not come whole after {REQUEST_S_MAX:g} s")


def _check_deadline(call: Call) -> None:
    now_s = perf_counter()
    if now_s >= call.deadline_s:
        waited_ms = (now_s - call.start_s) * 1000
        raise DeadlineExceededError(
            f"the deadline had passed when the request was read, {waited_ms:.1f} ms after its start"
        )


def _encode(call: Call, result: LookupResult) -> Encoded:
    """In a thread; not to its end where the client went away."""
    parts: list[bytes | memoryview] = []
    for part in call.asked.answer_codec.encode(result):
        if parts:
            time.sleep(TURN_S)
        parts.append(part)
        if not call.is_waiting:
            break
    return with_size(parts)
