"""Requests that wait for more than one batch: start-time fair queueing over who asks.

Each source (`Caller.source`) that has requests waiting gets an equal share of the work, however
much it asks for, and its own requests are taken in the order that they came: a request begins, on a
clock that counts work, where the one before it of its source ends, but not before now. Goyal, Vin
and Cheng, "Start-time Fair Queueing" (SIGCOMM 1996).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from embedserve.batching.caller import Caller


@dataclass(slots=True)
class Held:
    """What waits of one source.

    Attributes:
        end: of the last request, on the clock.
    """

    end: int
    requests: int = 0
    examples: int = 0
    ids: int = 0


Entry = tuple[int, int, Caller, object, int, int]
"""A request's start, its number, its caller and source, examples and ids: those of one that went
away are not known any more."""


class FairQueue:
    """Callers, the next of whom is the first by the clock.

    Attributes:
        now: where the request began that was taken last; work, in bytes.
    """

    def __init__(self) -> None:
        self.now = 0
        self._heap: list[Entry] = []
        self._held: dict[object, Held] = {}
        self._puts = 0  # those of the same start are taken in the order that they came

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, caller: Caller, work: int) -> None:
        source, request = caller.source, caller.request
        held = self._held.get(source)
        if held is None:
            held = self._held[source] = Held(self.now)
        start = max(self.now, held.end)
        examples, ids = request.batch_size, request.ids.size
        held.end = start + work
        held.requests += 1
        held.examples += examples
        held.ids += ids
        self._puts += 1
        heapq.heappush(self._heap, (start, self._puts, caller, source, examples, ids))

    def first(self) -> Caller:
        """Who is to be taken next."""
        return self._heap[0][2]

    def pop(self) -> Caller:
        """Takes the first."""
        entry = heapq.heappop(self._heap)
        self.now = entry[0]
        self._forget(entry)
        return entry[2]

    def keep(self, is_kept: Callable[[Caller], bool]) -> None:
        """Drops all others."""
        entries, self._heap = self._heap, []
        for entry in entries:
            if is_kept(entry[2]):
                self._heap.append(entry)
            else:
                self._forget(entry)
        heapq.heapify(self._heap)

    def _forget(self, entry: Entry) -> None:
        _, _, _, source, examples, ids = entry
        held = self._held[source]
        held.requests -= 1
        held.examples -= examples
        held.ids -= ids
        if not held.requests:
            del self._held[source]

    def held_by(self, source: object) -> tuple[int, int]:
        """(examples, ids) of a source's requests, those that went away included."""
        held = self._held.get(source)
        return (held.examples, held.ids) if held else (0, 0)
