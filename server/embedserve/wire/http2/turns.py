"""Work that one connection may do in an event-loop iteration, before it yields to others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from embedserve.wire.http2.inbound_flow_control import WINDOW_LOW, InboundFlowControl

WORK_PER_TURN = 32 << 10
"""Work units a connection may spend in one event-loop iteration, before it yields to others. A
decoded header block costs its bytes plus 32 per header, as HPACK counts. A frame without a request
costs ABUSE_WORK and a token, a request that is answered by its headers HEADERS_ONLY_WORK, and a
message of a stream MESSAGE_WORK. The whole budget takes some milliseconds."""
FRAMES_PER_TURN = 512
"""Frames of any type read in one event-loop iteration; STREAMS_MAX requests need fewer."""
ABUSE_WORK = 1024
"""Work units of one frame without a request. A reset also pays for the stream opened before it."""
HEADERS_ONLY_WORK = 1024
"""Work units of a request that is answered by its headers alone, such as a rejection. STREAMS_MAX
does not bound these, as each ends before the next begins."""
ABUSE_BYTES = 64
"""Payload bytes of a frame without a request that are charged as one more frame."""


class MessageTurns:
    """Turns of a connection's streams that have more messages than one turn takes.

    The messages were received, and their bytes stay counted by flow control until they are taken.
    One stream has its turn in an event-loop iteration.
    """

    __slots__ = ("_flow_control", "_on_output", "_waiting")

    def __init__(self, flow_control: InboundFlowControl, on_output: Callable[[], None]) -> None:
        self._flow_control = flow_control
        self._on_output = on_output
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, take: Callable[[], None]) -> None:
        """Calls ``take`` in a later event-loop iteration, once those added before had theirs."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._run)
        self._waiting.append(take)

    def _run(self) -> None:
        take = self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._run)
        take()
        if self._flow_control.window <= WINDOW_LOW:
            self._flow_control.top_up()
        if self._flow_control.out:
            self._on_output()
