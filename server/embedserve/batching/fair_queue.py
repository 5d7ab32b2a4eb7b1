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
from collections import OrderedDict
from dataclasses import dataclass, field

from embedserve.batching.pending_request import PendingRequest


@dataclass(slots=True, eq=False)
class Source:
    """Queued requests of one source.

    Attributes:
        key: the source, as `PendingRequest.source` returns it.
        pending: requests in order of arrival, as keys: any of them may be withdrawn.
        examples, ids: totals of the requests.
    """

    key: object
    pending: OrderedDict[PendingRequest, None] = field(default_factory=OrderedDict)
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

    def put(self, pending: PendingRequest) -> None:
        key, request = pending.source, pending.request
        source = self._sources.get(key)
        if source is None:
            source = self._sources[key] = Source(key)
            self._pushes += 1
            heapq.heappush(self._starts, (self._now, self._pushes, source))
        source.pending[pending] = None
        source.examples += request.batch_size
        source.ids += request.ids.size
        self.source_of[pending] = source

    def first(self) -> PendingRequest | None:
        """Returns the request to take next, None if the queue is empty."""
        while self._starts:
            start, _, source = self._starts[0]
            if source.pending:
                return next(iter(source.pending))
            self._now = start
            heapq.heappop(self._starts)
            del self._sources[source.key]
        return None

    def pop(self, work: int) -> None:
        """Removes the request that ``first`` returned and charges ``work`` to its source."""
        start, _, source = self._starts[0]
        self._now = start
        self._pushes += 1
        heapq.heapreplace(self._starts, (start + work, self._pushes, source))
        self._remove(next(iter(source.pending)))

    def withdraw(self, pending: PendingRequest) -> bool:
        """Removes ``pending``, whose request is still set; returns False if it is not queued."""
        if pending not in self.source_of:
            return False
        self._remove(pending)
        return True

    def _remove(self, pending: PendingRequest) -> None:
        source = self.source_of.pop(pending)
        del source.pending[pending]
        source.examples -= pending.request.batch_size
        source.ids -= pending.request.ids.size
        if not self.source_of:
            self._starts.clear()
            self._sources.clear()

    def held_by(self, key: object) -> tuple[int, int]:
        """Returns (examples, ids), the totals of the requests of one source."""
        source = self._sources.get(key)
        return (source.examples, source.ids) if source else (0, 0)
