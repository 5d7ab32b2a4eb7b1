"""What clients count, and send from their processes to the main program."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event
from random import Random
from time import monotonic

from soak.embeds import Ask

WRONG_MAX = 20
SAID_BYTES = 200


@dataclass(frozen=True)
class Loss:
    """Requests that were sent on one connection and never answered.

    Attributes:
        at_s: when that was known; monotonic, as all times of the soak.
        port: the client's; 0 where it is not known.
        opened_s: when the connection was.
        answered: how many requests the connection had answered before.
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
    """Counts by the kind of client.

    Attributes:
        sent: is the sum of the four that follow, and of what is under way.
        refused: since the queue was full.
        not_taken: clients were told to ask elsewhere, and may.
        latencies: (when asked, seconds) of answered requests, of clients that are timed.
        overload_s: for how long there was overload.
        unsent: of overload, for want of a connection.
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
    """Calm and overload in turn, calm first."""

    start_s: float
    each_s: float

    def is_overload(self, at_s: float) -> bool:
        return int((at_s - self.start_s) / self.each_s) % 2 == 1


@dataclass
class Site:
    """What the clients of one process share.

    Attributes:
        route: the HTTP and the gRPC port of the server that takes new connections, as a load
            balancer knows it.
        stop: set when clients are to ask no more.
    """

    route: SynchronizedArray[int]
    stop: Event
    phases: Phases
    random: Random
    is_timed: bool = False
    tally: Tally = field(default_factory=Tally)

    def taken(self) -> Tally:
        """The counts since it was asked last."""
        tally, self.tally = self.tally, Tally()
        return tally

    def refuse(self, kind: str, retry_after: object) -> None:
        self.tally.refused[kind] += 1
        if retry_after is None:
            self.tally.say_wrong(f"{kind}: refused without a time to ask again")

    def answer(self, kind: str, asked_s: float, one: Ask, body: bytes) -> None:
        self.tally.answered[kind] += 1
        if not one.is_answer(body):
            self.tally.say_wrong(f"{kind}: a wrong answer: {body[:SAID_BYTES]!r}")
        if self.is_timed:
            self.tally.latencies.append((asked_s, monotonic() - asked_s))
