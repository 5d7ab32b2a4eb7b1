"""Counts of the clients, as their processes send them to the main program."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event
from random import Random
from time import monotonic

from soak.embeds import EmbedCase

WRONG_MAX = 20
SAID_BYTES = 200


@dataclass(frozen=True)
class Loss:
    """Requests that were sent on one connection and never answered.

    Attributes:
        at_s: time when the loss was noticed; monotonic, as all times of the soak.
        port: client port; 0 if it is not known.
        opened_s: time when the connection was opened.
        answered: responses on the connection before.
    """

    kind: str
    count: int
    at_s: float
    port: int
    opened_s: float
    answered: int
    what: str


@dataclass
class Tally:
    """Counts by kind of client.

    Attributes:
        sent: sum of answered, refused, not taken, lost and pending requests.
        refused: rejections by a full queue.
        not_taken: requests that the server did not take, which the client may repeat elsewhere.
        latencies: (start, seconds) of answered requests, of clients that are timed.
        overload_s: seconds of overload.
        unsent: requests of the overload that found no free connection.
    """

    sent: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    not_taken: Counter[str] = field(default_factory=Counter)
    losses: list[Loss] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    latencies: list[tuple[float, float]] = field(default_factory=list)
    overload_s: float = 0.0
    unsent: int = 0

    def lost(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for loss in self.losses:
            counts[loss.kind] += loss.count
        return counts

    def add(self, other: Tally) -> None:
        for one in fields(self):
            mine, more = getattr(self, one.name), getattr(other, one.name)
            mine += more
            setattr(self, one.name, mine)

    def say_wrong(self, what: str) -> None:
        if len(self.wrong) < WRONG_MAX:
            self.wrong.append(what)


@dataclass(frozen=True)
class Phases:
    """Alternating phases of calm and overload, calm first."""

    start_s: float
    each_s: float

    def is_overload(self, at_s: float) -> bool:
        return int((at_s - self.start_s) / self.each_s) % 2 == 1


@dataclass
class ClientContext:
    """State shared by the clients of one process.

    Attributes:
        route: HTTP and gRPC port of the server that accepts new connections, as a load balancer
            knows it.
        stop: set to end all clients.
    """

    route: SynchronizedArray[int]
    stop: Event
    phases: Phases
    random: Random
    is_timed: bool = False
    tally: Tally = field(default_factory=Tally)

    def taken(self) -> Tally:
        """Returns the counts since the last call."""
        tally, self.tally = self.tally, Tally()
        return tally

    def refuse(self, kind: str, retry_after: object) -> None:
        self.tally.refused[kind] += 1
        if retry_after is None:
            self.tally.say_wrong(f"{kind}: refused without a time to ask again")

    def answer(self, kind: str, asked_s: float, one: EmbedCase, body: bytes) -> None:
        self.tally.answered[kind] += 1
        if not one.is_answer(body):
            self.tally.say_wrong(f"{kind}: a wrong answer: {body[:SAID_BYTES]!r}")
        if self.is_timed:
            self.tally.latencies.append((asked_s, monotonic() - asked_s))
