"""Requests that wait for more than one batch: start-time fair queueing over who asks.

Sources (`Caller.source`) with requests waiting get equal shares of the work, however much each asks
for, and a source's own requests are taken in the order that they came. On a clock that counts work,
each source's next request starts where the one that it was last given ends, but not before now;
the first by the clock is taken next. Goyal, Vin and Cheng, "Start-time Fair Queueing" (SIGCOMM
1996), but that starts are set when a request's turn comes and not as it arrives: one that its
caller gives up, or that comes too late, costs its source nothing.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from embedserve.batching.pending_request import PendingRequest

GONE_MIN = 1024
"""Callers that went away are taken from the middle once they are so many, and half of all."""


@dataclass(slots=True, eq=False)
class Source:
    """What waits of one source.

    Attributes:
        callers: those that went away are still among them.
        examples, ids: of the others.
    """

    key: object
    callers: deque[PendingRequest] = field(default_factory=deque)
    examples: int = 0
    ids: int = 0


class FairQueue:
    """Callers that wait, each with its request."""

    def __init__(self) -> None:
        self._now = 0
        # Each source once, with the start of its next request; one that has none is forgotten
        # once the clock is there: until then it has had its share.
        self._starts: list[tuple[int, int, Source]] = []
        self._sources: dict[object, Source] = {}
        self._source_of: dict[PendingRequest, Source] = {}
        self._pushes = 0  # of the same start, those that came first are first
        self._gone = 0

    def __len__(self) -> int:
        return len(self._source_of)

    def put(self, pending: PendingRequest) -> None:
        key, request = pending.source, pending.request
        source = self._sources.get(key)
        if source is None:
            source = self._sources[key] = Source(key)
            self._pushes += 1
            heapq.heappush(self._starts, (self._now, self._pushes, source))
        source.callers.append(pending)
        source.examples += request.batch_size
        source.ids += request.ids.size
        self._source_of[pending] = source

    def first(self) -> PendingRequest | None:
        """Who is to be taken next; None: nobody waits."""
        while self._starts:
            start, _, source = self._starts[0]
            callers = source.callers
            while callers and callers[0] not in self._source_of:
                callers.popleft()
                self._gone -= 1
            if callers:
                return callers[0]
            self._now = max(self._now, start)
            heapq.heappop(self._starts)
            del self._sources[source.key]
        return None

    def pop(self, work: int) -> None:
        """Takes the first, which is given so much ``work``."""
        start, _, source = self._starts[0]
        caller = source.callers.popleft()
        self._uncount(caller, self._source_of.pop(caller))
        self._now = start
        self._pushes += 1
        heapq.heapreplace(self._starts, (start + work, self._pushes, source))
        self._forget_if_empty()

    def withdraw(self, pending: PendingRequest) -> bool:
        """Takes ``caller`` out, which still has its request; False: it is not here."""
        source = self._source_of.pop(pending, None)
        if source is None:
            return False
        self._uncount(pending, source)
        self._gone += 1
        self._forget_if_empty()
        if self._gone >= GONE_MIN and self._gone >= len(self):
            self._gone = 0
            for one in self._sources.values():
                one.callers = deque([other for other in one.callers if other in self._source_of])
        return True

    def _uncount(self, pending: PendingRequest, source: Source) -> None:
        source.examples -= pending.request.batch_size
        source.ids -= pending.request.ids.size

    def _forget_if_empty(self) -> None:
        if not self._source_of:
            self._starts.clear()
            self._sources.clear()
            self._gone = 0

    def held_by(self, key: object) -> tuple[int, int]:
        """(examples, ids) of a source's requests."""
        source = self._sources.get(key)
        return (source.examples, source.ids) if source else (0, 0)
