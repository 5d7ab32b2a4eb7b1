"""Fake shards, connections, clock and timers without an event loop, for tests of replica choice."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from embedserve.call_trace import CallTrace
from embedserve.model_names import VersionKey
from embedserve.shard_client.client_stream import OnReply
from embedserve.shard_client.part_client import PartClient, PartOptions
from embedserve.shard_client.reply import RESOURCE_EXHAUSTED, Reply, lost
from embedserve.shard_client.shard_connection import Address, ShardConnection
from embedserve.shard_client.timer_queue import TimerQueue
from embedserve_proto.embedding_pb2 import ListModelsResponse, Model

KEY = VersionKey("dlrm", 7)
PART, PARTS = 1, 4
FINGERPRINT = "f7"
OVERLOADED = Reply(RESOURCE_EXHAUSTED, "full", retry_after_s=1)


@dataclass(eq=False)
class FakeTimer:
    at_s: float
    run: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeTime:
    """A clock that only ``advance`` moves.

    Attributes:
        now_s: current time.
    """

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.timers: list[FakeTimer] = []

    def clock(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, run: Callable[[], None]) -> asyncio.TimerHandle:
        assert delay_s >= 0
        timer = FakeTimer(self.now_s + delay_s, run)
        self.timers.append(timer)
        return cast(asyncio.TimerHandle, timer)

    def advance(self, seconds: float) -> None:
        """Runs the timers that are due in the next ``seconds``, each at its time."""
        end_s = self.now_s + seconds
        while True:
            self.timers = [timer for timer in self.timers if not timer.is_cancelled]
            due = min(self.timers, key=lambda timer: timer.at_s, default=None)
            if due is None or due.at_s > end_s:
                break
            self.timers.remove(due)
            self.now_s = max(self.now_s, due.at_s)
            due.run()
        self.now_s = end_s


@dataclass(eq=False)
class FakeCall:
    """A call to a replica; ``answer`` completes it."""

    connection: "FakeConnection"
    message: bytes
    timeout_s: float
    on_done: OnReply
    traceparent: bytes = b""
    is_cancelled: bool = False
    is_answered: bool = False

    def cancel(self) -> None:
        if not self.is_answered:
            self.is_cancelled = True
            self.connection.drop(self)

    def answer(self, reply: Reply | None = None) -> None:
        assert not self.is_cancelled
        assert not self.is_answered
        self.is_answered = True
        self.connection.drop(self)
        self.connection.last_received_s = self.connection.time.now_s
        self.on_done(reply or Reply(0, "", self.connection.address[0].encode()))

    def lose(self, reason: str) -> None:
        self.is_answered = True
        self.on_done(lost(reason))

    @property
    def host(self) -> str:
        return self.connection.address[0]


class FakeConnection:
    """A connection to a fake shard."""

    def __init__(
        self,
        time: FakeTime,
        address: Address,
        on_ready: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.time, self.address = time, address
        self.on_ready, self.on_end = on_ready, on_end
        self.last_received_s = time.now_s
        self.calls: list[FakeCall] = []
        self.lists: list[FakeCall] = []
        self.extra_in_flight = 0
        self.pings = 0
        self.is_ready = self.has_ended = self.is_finished = False

    @property
    def in_flight(self) -> int:
        return len(self.calls) + self.extra_in_flight

    def call(
        self,
        message: Sequence[bytes],
        timeout_s: float,
        on_done: OnReply,
        traceparent: bytes = b"",
    ) -> FakeCall:
        assert self.is_ready
        assert timeout_s > 0
        call = FakeCall(self, b"".join(message), timeout_s, on_done, traceparent)
        self.calls.append(call)
        return call

    def list_models(self, timeout_s: float, on_done: OnReply) -> FakeCall:
        assert self.is_ready
        call = FakeCall(self, b"", timeout_s, on_done)
        self.lists.append(call)
        return call

    def drop(self, call: FakeCall) -> None:
        for calls in (self.calls, self.lists):
            if call in calls:
                calls.remove(call)

    def ping(self) -> None:
        self.pings += 1

    def finish(self, reason: str) -> None:
        self.is_finished, self.is_ready = True, False
        self._end(reason)

    def ready(self) -> None:
        self.is_ready = True
        self.last_received_s = self.time.now_s
        self.on_ready()

    def list(self, *models: Model) -> None:
        """Responds to ListModels."""
        reply = Reply(0, "", ListModelsResponse(models=models).SerializeToString())
        self.lists[0].answer(reply)

    def lose(self, reason: str = "the connection was lost") -> None:
        """Loses the connection: it ends, then its calls fail."""
        self.is_ready = False
        self._end(reason)
        calls, self.calls, self.lists = self.calls + self.lists, [], []
        for call in calls:
            if not call.is_cancelled:
                call.lose(reason)

    def _end(self, reason: str) -> None:
        if not self.has_ended:
            self.has_ended = True
            self.on_end(reason)


def model(
    version: int = 7, fingerprint: str = FINGERPRINT, part: int = PART, parts: int = PARTS
) -> Model:
    return Model(model="dlrm", version=version, fingerprint=fingerprint, part=part, parts=parts)


@dataclass
class Bench:
    """A part's client over fake shards.

    Attributes:
        hosts: hosts of replicas that join at first, a letter each.
        connections: newest connection to each host.
        replies: replies to lookups, by their numbers.
    """

    hosts: str = ""
    options: PartOptions = field(default_factory=PartOptions)
    connections: dict[str, FakeConnection] = field(default_factory=dict)
    replies: dict[int, Reply] = field(default_factory=dict)
    looked_up: int = 0

    def __post_init__(self) -> None:
        self.time = FakeTime()
        timers = TimerQueue(self.time.clock, self.time.call_later)
        self.part = PartClient(PART, PARTS, self._connect, self.options, timers)
        self.part.expect(KEY, FINGERPRINT)
        self.join(*self.hosts)

    def _connect(
        self, address: Address, on_ready: Callable[[], None], on_end: Callable[[str], None]
    ) -> ShardConnection:
        connection = FakeConnection(self.time, address, on_ready, on_end)
        self.connections[address[0]] = connection
        return cast(ShardConnection, connection)

    def join(self, *hosts: str) -> None:
        """Connects replicas that serve the expected version."""
        self.part.set_addresses([(host, 1) for host in hosts])
        for host in hosts:
            if not self.connections[host].is_ready:
                self.connections[host].ready()
                self.connections[host].list(model())

    def look_up(
        self, seconds: float = 10.0, message: bytes = b"m", calls: CallTrace | None = None
    ) -> int:
        """Starts a lookup, and returns its number."""
        number = self.looked_up
        self.looked_up += 1

        def on_done(reply: Reply) -> None:
            assert number not in self.replies, "a second reply"
            self.replies[number] = reply

        deadline_s = self.time.now_s + seconds
        self.part.look_up(KEY, (message,), deadline_s, on_done, calls)
        assert number not in self.replies, "a reply before look_up has returned"
        return number

    @property
    def outcomes(self) -> dict[str, int]:
        """Returns the number of ended lookups by outcome."""
        return self.part.stats.calls

    @property
    def calls(self) -> list[FakeCall]:
        """Returns the calls in flight, of all replicas."""
        return [call for one in self.connections.values() for call in one.calls]

    def add_latencies(self, seconds: float, count: int = 64) -> None:
        """Adds ``count`` latencies of ``seconds`` to the part's statistics."""
        for _ in range(count):
            self.part.recent.add(seconds)

    def answer_polls(self) -> None:
        for connection in self.connections.values():
            if connection.lists:
                connection.list(model())
