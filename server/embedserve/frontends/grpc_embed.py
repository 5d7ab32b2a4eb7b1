"""One Embed call that waits in the queue without a task; its answer is sent as its batch ends.

No future is set and no task woken for it, which would cost as much as decoding and encoding.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from time import perf_counter

from embedserve.codec import protobuf_codec
from embedserve.errors import INTERNAL, EmbedServeError, EngineError
from embedserve.frontends.grpc_call import Call, ClientGoneError
from embedserve.frontends.grpc_server import error_status
from embedserve.frontends.grpc_wire import PREFIX_BYTES, framed
from embedserve.metrics import ProtocolMetrics
from embedserve.types import LookupResult

logger = logging.getLogger(__name__)


class EmbedCall:
    """The Caller of a request that came over gRPC; ended once, whatever happens.

    Attributes:
        is_waiting: until it is answered, refused or given up.
        ended: set then, for who waits for that.
    """

    __slots__ = ("_call", "_forget", "_metrics", "_start_s", "ended", "is_waiting")

    def __init__(
        self,
        call: Call,
        start_s: float,
        metrics: ProtocolMetrics,
        forget: Callable[[EmbedCall, Call], None],
    ) -> None:
        """``forget`` is called as it ends."""
        self._call = call
        self._start_s = start_s
        self._metrics = metrics
        self._forget = forget
        self.is_waiting = True
        self.ended: asyncio.Future[None] | None = None

    def answer(self, result: LookupResult) -> None:
        try:
            body = framed(*protobuf_codec.encode_parts(result))
        except Exception as error:
            return self.fail(error)
        self._metrics.answered(perf_counter() - self._start_s, len(body) - PREFIX_BYTES)
        with contextlib.suppress(ClientGoneError):
            self._call.answer(body)
        self._end()

    def refuse(self, error: EmbedServeError) -> None:
        self._metrics.failed(error.code, perf_counter() - self._start_s)
        with contextlib.suppress(ClientGoneError):
            self._call.end(*error_status(error))
        self._end()

    def fail(self, error: Exception) -> None:
        """Refuses for an error that nobody foresaw."""
        logger.error("a call failed", exc_info=error)
        self.refuse(EngineError(INTERNAL))

    def cancel(self) -> None:
        """Leaves the queue: the client went away."""
        if self.is_waiting:
            self._metrics.failed("CANCELLED", perf_counter() - self._start_s)
            self._end()

    def _end(self) -> None:
        self.is_waiting = False
        self._forget(self, self._call)
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)
