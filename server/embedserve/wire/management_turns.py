"""Turns of management requests, so that many of them do not keep the event loop from lookups."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from embedserve.errors import OverloadedError
from embedserve.wire.http_stream import StreamConnection

WAITING_BODY_BYTES_MAX = 16 << 20
"""Bytes of bodies that wait with their requests: 256 of the largest size. The limit on what
connections hold does not count them. Scrapes and probes have no bodies."""

Begin = Callable[[], None]


class ManagementTurns:
    """Queue of complete management requests; a few begin in each event-loop iteration.

    Connections take turns. The requests of each begin in the order of their arrival. A request
    that awaits something after its beginning, such as the load of a version, holds up no other.
    """

    def __init__(self, per_iteration: int) -> None:
        """
        Args:
            per_iteration: number of requests that begin in an event-loop iteration.
        """
        self._per_iteration = per_iteration
        self._waiting: OrderedDict[StreamConnection, deque[tuple[Begin, int]]] = OrderedDict()
        self._body_bytes = 0
        self._is_scheduled = False

    def add(self, connection: StreamConnection, begin: Begin, body_bytes: int) -> None:
        """Calls ``begin`` in a later event-loop iteration, unless it is withdrawn before.

        Raises:
            OverloadedError: with ``body_bytes`` more, too many bytes of bodies would wait.
        """
        if body_bytes and self._body_bytes + body_bytes > WAITING_BODY_BYTES_MAX:
            raise OverloadedError("too many management requests with a body wait for their turn")
        self._body_bytes += body_bytes
        self._waiting.setdefault(connection, deque()).append((begin, body_bytes))
        self._schedule()

    def withdraw(self, connection: StreamConnection, begin: Begin, body_bytes: int) -> None:
        """Removes a request, given as it was added. Does nothing if it does not wait."""
        requests = self._waiting.get(connection)
        if requests is None or (begin, body_bytes) not in requests:
            return
        requests.remove((begin, body_bytes))
        self._body_bytes -= body_bytes
        if not requests:
            del self._waiting[connection]

    def _schedule(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_some)

    def _begin_some(self) -> None:
        self._is_scheduled = False
        for _ in range(self._per_iteration):
            if not self._waiting:
                return
            connection, requests = self._waiting.popitem(last=False)
            begin, body_bytes = requests.popleft()
            self._body_bytes -= body_bytes
            if requests:
                self._waiting[connection] = requests
            begin()
        self._schedule()
