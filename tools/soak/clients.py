"""REST clients over keep-alive connections: one request at a time, pipelined, or open-loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from time import monotonic

from server.raw_http import read_response
from soak.embeds import EmbedCase
from soak.tally import ClientContext, Loss

ANSWER_S_MAX = 60.0
"""Seconds for a response; more than the time in which a hung worker is replaced on a busy machine.
"""
CONNECT_PAUSE_S = 0.02
BUFFER_BYTES = 1 << 20
LINE_REQUESTS = 300
"""Requests after which a client opens another connection. Otherwise all connections would end up at
the workers that were not killed."""
LINES_MAX = 160
"""Connections of the open-loop clients. The load is open-loop as long as some of them are idle."""
TICK_S = 0.005


class ClientConnection:
    """A connection, with the facts that identify a loss on it."""

    def __init__(
        self, site: ClientContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.is_open = True
        self._site = site
        self._reader = reader
        self._writer = writer
        self._port: int = writer.get_extra_info("sockname")[1]
        self._opened_s = monotonic()
        self._answered = 0

    @property
    def is_usable(self) -> bool:
        """Returns whether the connection takes requests, as far as is known."""
        return self.is_open and not self._reader.at_eof() and not self._writer.is_closing()

    @property
    def is_used_up(self) -> bool:
        return self._answered >= LINE_REQUESTS

    def write(self, data: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(data)

    def close(self) -> None:
        self.is_open = False
        self._writer.close()

    def lose(self, kind: str, count: int, what: str) -> None:
        found = Loss(
            kind, count, monotonic(), self._port, self._opened_s, self._answered, what[:200]
        )
        self._site.tally.losses.append(found)


async def connected(
    site: ClientContext, is_grpc: bool
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    """Connects to the server that accepts new connections. Returns None if there is none until the
    stop."""
    while not site.stop.is_set():
        try:
            return await asyncio.open_connection(
                "127.0.0.1", site.route[is_grpc], limit=BUFFER_BYTES
            )
        except OSError:  # it has just been stopped, or a worker of it killed: nothing was asked
            await asyncio.sleep(CONNECT_PAUSE_S)
    return None


class RestConnection(ClientConnection):
    """An HTTP/1 connection."""

    @classmethod
    async def open(cls, site: ClientContext) -> RestConnection | None:
        found = await connected(site, is_grpc=False)
        return None if found is None else cls(site, *found)

    async def ask(self, kind: str, asks: Sequence[EmbedCase], is_json: bool = False) -> int:
        """Sends all requests at once, and reads the responses. Closes the connection if the server
        requests it.

        Returns:
            the number of responses with values.
        """
        site, left, asked_s, answered = self._site, len(asks), monotonic(), 0
        site.tally.sent[kind] += left
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                self.write(b"".join(one.json if is_json else one.protobuf for one in asks))
                for one in asks:
                    status, headers, body = await read_response(self._reader)
                    left -= 1
                    self._answered += 1
                    if status == 200:
                        answered += 1
                        site.answer(kind, asked_s, one, body)
                    elif status == 429:
                        site.refuse(kind, headers.get(b"retry-after"))
                    else:
                        site.tally.answered[kind] += 1
                        site.tally.say_wrong(f"{kind}: {status} {body[:200]!r}")
                    if headers.get(b"connection") == b"close":
                        self.close()
                        break
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            self.lose(kind, left, repr(error))
            self.close()
        else:
            if left:
                self.lose(kind, left, "after 'connection: close'")
        return answered


async def ask_in_turn(
    site: ClientContext,
    kind: str,
    asks: Sequence[EmbedCase],
    at_once: int,
    rate: float,
    is_json: bool,
) -> None:
    """Sends one batch of pipelined requests after the other until the stop, ``rate`` batches a
    second."""
    line: RestConnection | None = None
    while not site.stop.is_set():
        if line is None or line.is_used_up or not line.is_usable:
            if line is not None:
                line.close()
            line = await RestConnection.open(site)
            continue
        await line.ask(kind, site.random.choices(asks, k=at_once), is_json)
        await asyncio.sleep(site.random.uniform(0.5, 1.5) / rate)
    if line is not None:
        line.close()


class OpenLoopClients:
    """Sends requests at a rate that does not depend on the responses, over as many connections as
    needed."""

    def __init__(self, site: ClientContext, kind: str, asks: Sequence[EmbedCase]) -> None:
        self._site = site
        self._kind = kind
        self._asks = asks
        self._idle: deque[RestConnection] = deque()
        self._busy: set[asyncio.Task[None]] = set()
        self._answered = 0

    async def measure(self, seconds: float, at_once: int) -> float:
        """Returns the responses per second with ``at_once`` requests always pending."""
        start_s = monotonic()
        while monotonic() < start_s + seconds:
            while len(self._busy) < at_once:
                self._begin()
            await asyncio.wait(self._busy, return_when=asyncio.FIRST_COMPLETED)
        took_s = monotonic() - start_s
        answered = self._answered
        await self._finish()
        return answered / took_s

    async def overload(self, times: float, capacity: float) -> None:
        """Sends ``times`` the capacity during overload phases, until the stop.

        The capacity is ``capacity`` requests a second, or more if a second had more responses.
        """
        site = self._site
        looked_s, due = monotonic(), 0.0
        second_s, before = looked_s, self._answered
        while not site.stop.is_set():
            await asyncio.sleep(TICK_S)
            now_s = monotonic()
            passed_s, looked_s = now_s - looked_s, now_s
            if not site.phases.is_overload(now_s):
                due = 0.0
                continue
            site.tally.overload_s += passed_s
            if now_s - second_s >= 1:
                capacity = max(capacity, (self._answered - before) / (now_s - second_s))
                second_s, before = now_s, self._answered
            due += times * capacity * passed_s
            while due >= 1:
                due -= 1
                if len(self._busy) < LINES_MAX:
                    self._begin()
                else:
                    site.tally.unsent += 1
        await self._finish()

    def _begin(self) -> None:
        task = asyncio.create_task(self._ask_one())
        self._busy.add(task)
        task.add_done_callback(self._busy.discard)

    async def _ask_one(self) -> None:
        line: RestConnection | None = None
        while self._idle and line is None:
            found = self._idle.popleft()  # the one that was idle longest: none is idle for long
            if found.is_usable:
                line = found
            else:
                found.close()
        line = line or await RestConnection.open(self._site)
        if line is None:
            return
        one = self._site.random.choice(self._asks)
        answered = await line.ask(self._kind, [one])
        self._answered += answered
        if line.is_used_up:
            line.close()
        elif line.is_usable:
            self._idle.append(line)

    async def _finish(self) -> None:
        if self._busy:
            await asyncio.wait(self._busy)
        while self._idle:
            self._idle.pop().close()
