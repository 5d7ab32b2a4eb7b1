"""Start-time fair queueing between sources, for requests that do not all fit into one batch.

Sources (`PendingRequest.source`) with queued requests get equal shares of the work, however much
each of them requests. The requests of one source are taken in order of arrival.

A virtual clock counts work. The next request of a source starts where its last taken request ends,
but not before the current virtual time. The request with the earliest start is taken next. See
Goyal, Vin and Cheng, "Start-time Fair Queueing" (SIGCOMM 1996). Unlike there, a start is set when a
request becomes the first of its source, not on arrival. An abandoned request therefore costs its
source nothing, and an expired one no more than its rejection.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from embedserve.batching.pending_request import PendingRequest

GONE_MIN = 1024
"""Number of withdrawn requests from which the deques are compacted.

Compaction also requires that they make up half of all entries, so that its cost is amortised."""


@dataclass(slots=True, eq=False)
class Source:
    """Queued requests of one source.

    Attributes:
        pending: requests in order of arrival, with withdrawn requests still among them.
        examples, ids: totals of the requests that were not withdrawn.
    """

    key: object
    pending: deque[PendingRequest] = field(default_factory=deque)
    examples: int = 0
    ids: int = 0


class FairQueue:
    """Queue of pending requests, fair between their sources.

    Attributes:
        source_of: the source of each queued request.
    """

    def __init__(self) -> None:
        self._now = 0
        # A heap with each source once, by the start of its next request. A source without requests
        # is removed only when the clock reaches its start: until then it has used up its share.
        self._starts: list[tuple[int, int, Source]] = []
        self._sources: dict[object, Source] = {}
        self.source_of: dict[PendingRequest, Source] = {}
        self._pushes = 0  # orders entries with the same start by insertion
        self._gone = 0

    def put(self, pending: PendingRequest) -> None:
        key, request = pending.source, pending.request
        source = self._sources.get(key)
        if source is None:
            source = self._sources[key] = Source(key)
            self._pushes += 1
            heapq.heappush(self._starts, (self._now, self._pushes, source))
        source.pending.append(pending)
        source.examples += request.batch_size
        source.ids += request.ids.size
        self.source_of[pending] = source

    def first(self) -> PendingRequest | None:
        """Returns the request to take next, None if the queue is empty."""
        while self._starts:
            start, _, source = self._starts[0]
            pending = source.pending
            while pending and pending[0] not in self.source_of:
                pending.popleft()
                self._gone -= 1
            if pending:
                return pending[0]
            self._now = max(self._now, start)
            heapq.heappop(self._starts)
            del self._sources[source.key]
        return None

    def pop(self, work: int) -> None:
        """Removes the request that ``first`` returned and charges ``work`` to its source."""
        start, _, source = self._starts[0]
        pending = source.pending.popleft()
        self._uncount(pending, self.source_of.pop(pending))
        self._now = start
        self._pushes += 1
        heapq.heapreplace(self._starts, (start + work, self._pushes, source))
        self._forget_if_empty()

    def withdraw(self, pending: PendingRequest) -> bool:
        """Removes ``pending``, whose request is still set; returns False if it is not queued."""
        source = self.source_of.pop(pending, None)
        if source is None:
            return False
        self._uncount(pending, source)
        self._gone += 1
        self._forget_if_empty()
        if self._gone >= GONE_MIN and self._gone >= len(self.source_of):
            self._gone = 0
            for one in self._sources.values():
                one.pending = deque([left for left in one.pending if left in self.source_of])
        return True

    def _uncount(self, pending: PendingRequest, source: Source) -> None:
        source.examples -= pending.request.batch_size
        source.ids -= pending.request.ids.size

    def _forget_if_empty(self) -> None:
        if not self.source_of:
            self._starts.clear()
            self._sources.clear()
            self._gone = 0

    def held_by(self, key: object) -> tuple[int, int]:
        """Returns (examples, ids), the totals of the requests of one source."""
        source = self._sources.get(key)
        return (source.examples, source.ids) if source else (0, 0)
