"""The shards of a router: a client for each part, and the versions that they have to serve.

Before a server's event loop runs, ``open_all`` runs one of its own: it waits until each part has a
replica, and compares the goldens of what is to be served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from time import monotonic, sleep
from typing import Any, TypeVar
from weakref import ref

import torch

from embedserve.call_trace import CallTrace
from embedserve.config import ServeSettings
from embedserve.daemon_threads import run_in_daemon_thread
from embedserve.fanout.credentials import follow_credentials
from embedserve.fanout.local_part import LocalParts
from embedserve.fanout.parted_version import ExpectedPart, expected_parts
from embedserve.fanout.router_engine import RouterEngine
from embedserve.fanout.values_budget import ValuesBudget
from embedserve.file_reloader import poll_all
from embedserve.metrics.shard_metrics import PartStats
from embedserve.model_names import VersionKey
from embedserve.on_missing import MissingPolicy
from embedserve.shard_client.client_stream import OnReply
from embedserve.shard_client.discovery import PART, DnsShards, RayShards, discover, parse_shards
from embedserve.shard_client.part_client import PartClient, PartOptions
from embedserve.shard_client.replica import Connect
from embedserve.shard_client.shard_connection import Address, ConnectionOptions, ShardConnection
from embedserve.shard_client.timer_queue import TimerQueue
from embedserve_store import ModelVersion
from embedserve_store.errors import UnopenedError

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S = 0.05
"""Interval of the check whether each part has a replica."""
LOG_S = 10.0
"""Seconds between two log lines about parts without a replica."""
START_S_MAX = 10.0
"""Seconds that a process waits for its shards when its event loop starts. ``open_all`` has found
all of them before."""
OPEN_S_MAX = 10.0
"""Seconds that ``open`` waits for a replica of each part. The process that watches the store has
found them already, and the others find them at their own polls."""
CALL_S_MAX = 10.0
"""Seconds that another thread waits for the event loop."""


class Shards:
    """Clients of the parts of all versions of a process.

    Attributes:
        loop: event loop that the clients run on; None before the first one.
        traces_calls: whether calls are recorded for traces.
        budget: bound of the values of batches in flight.
    """

    def __init__(self, settings: ServeSettings) -> None:
        """
        Raises:
            ValueError: ``settings.shards`` does not say where addresses come from,
                ``settings.on_missing`` is invalid, or a certificate or the token cannot be used.
            OSError: a file of them cannot be read.
        """
        self.loop: asyncio.AbstractEventLoop | None = None
        self.traces_calls = bool(settings.otlp_endpoint)
        self.budget = ValuesBudget()
        source = parse_shards(settings.shards)
        assert not isinstance(source, RayShards)  # processes.serve replaces them by a file
        self._source = source
        self._options = PartOptions(
            call_timeout_s=settings.shard_timeout_ms / 1000, hedge_share=settings.hedge_share
        )
        self._settings = settings
        self._local = LocalParts(settings.limits.inline_bytes_max)
        self._on_missing = MissingPolicy.parse(settings.on_missing)
        self._clients: dict[int, list[PartClient]] = {}  # by number of parts
        self._connection_options: ConnectionOptions
        self._credentials = follow_credentials(settings, self._adopt_options)
        self._tasks: list[asyncio.Task[None]] = []
        self._discoveries: dict[int, asyncio.Task[None]] = {}  # by number of parts
        self._engines: list[ref[RouterEngine]] = []

    def clients(self) -> Iterator[PartClient]:
        """Yields the client of each part."""
        for clients in self._clients.values():
            yield from clients

    def part_counts(self) -> Iterator[tuple[int, PartStats]]:
        """Yields (number of the part, counts) of each client."""
        for client in self.clients():
            yield client.part, client.stats

    def replicas(self, model: str, version: int) -> list[int]:
        """Returns the number of joined replicas of each part of a version that is expected."""
        key = VersionKey(model, version)
        joined = (client.stats.replicas.get(key) for client in self.clients())
        return [count for count in joined if count is not None]

    def describe(self, model: str, version: int) -> list[dict[str, Any]]:
        """Returns the parts of a version that is expected, as JSON values."""
        key = VersionKey(model, version)
        return [
            {
                "part": client.part,
                "replicas": count,
                "why": "" if count else client.why_unavailable(key),
            }
            for client in self.clients()
            if (count := client.stats.replicas.get(key)) is not None
        ]

    def open_all(
        self, versions: Mapping[str, ModelVersion], *, is_shown: bool = True
    ) -> dict[str, RouterEngine]:
        """Returns the engine of each of ``versions``, once each part has a replica and the goldens
        are answered as published. Runs an event loop of its own.

        Raises:
            StoreError: the goldens are answered otherwise, or the tables of a router are damaged.
            OSError, ValueError: the file of addresses cannot be read.
        """
        torch.set_num_threads(1)  # its threads would spin while idle, on cores that others need
        warnings.filterwarnings("ignore", message=".*not writable.*")  # ids may be views of bodies
        if self._settings.local_bytes:
            # Takes seconds, in which requests would wait if a later version were the first to have
            # local tables.
            import embedserve.engine.restore  # noqa: F401
        engines = {name: self._engine(version) for name, version in versions.items()}
        self._engines = [ref(engine, self._on_release) for engine in engines.values()]
        asyncio.run(self._check(list(engines.values()), is_shown=is_shown))
        return engines

    def _engine(self, version: ModelVersion) -> RouterEngine:
        settings = self._settings
        return RouterEngine(
            version,
            self,
            settings.partial_dtype,
            self._on_missing,
            self._local.open(version),
            settings.limits.inline_bytes_max,
            settings.row_cache,
        )

    async def _check(self, engines: Sequence[RouterEngine], *, is_shown: bool) -> None:
        async with self._running():
            await self._await_replicas(is_shown=is_shown)
            for engine in engines:
                await run_in_daemon_thread("goldens", engine.warm_up)  # a stop awaits no shards

    async def start(self) -> None:
        """Connects to the shards on the running event loop, and waits for those that were there
        before."""
        self._begin()
        try:
            async with asyncio.timeout(START_S_MAX):
                await self._await_replicas(is_shown=False)
        except TimeoutError:
            logger.error("serving begins without all shards: %s", self._all_missing())

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Connects to the shards on the running event loop, for its block. Replicas join for the
        server after it, which logs them."""
        options, self._options = self._options, replace(self._options, join_level=logging.DEBUG)
        try:
            self._begin()
            yield
        finally:
            for task in (*self._tasks, *self._discoveries.values()):
                task.cancel()
            for client in self.clients():
                client.close()
            self._clients, self._discoveries = {}, {}  # their counts are not those of the server
            self._options = options
            await asyncio.sleep(0)  # connections without calls are closed now

    def _begin(self) -> None:
        self.loop = asyncio.get_running_loop()
        # One timer for the calls of all parts: a batch begins them at once.
        self._timers = TimerQueue(monotonic, self.loop.call_later)
        self._clients, self._tasks, self._discoveries = {}, [], {}
        if self._credentials is not None:
            self._tasks.append(asyncio.ensure_future(poll_all([self._credentials])))
        for engine in self._opened():
            self._expect(engine.expected_parts)

    def _opened(self) -> list[RouterEngine]:
        """Returns the engines that are in use."""
        return [engine for engine in (one() for one in self._engines) if engine is not None]

    async def _await_replicas(self, *, is_shown: bool) -> None:
        """Waits until each part of each engine has a replica; logs what it waits for if
        ``is_shown``."""
        log_s = monotonic() + LOG_S / 10
        while missing := self._all_missing():
            if is_shown and monotonic() > log_s:
                logger.warning("waiting for shards: %s", missing)
                log_s = monotonic() + LOG_S
            await asyncio.sleep(POLL_S)

    def _all_missing(self) -> str:
        return "; ".join(
            filter(None, (self._missing(one.expected_parts) for one in self._opened()))
        )

    # On the event loop

    def call_part(
        self,
        expected: ExpectedPart,
        message: Sequence[bytes],
        deadline_s: float,
        on_done: OnReply,
        calls: CallTrace | None,
    ) -> None:
        """Looks ``message`` up in ``expected``; see PartClient.look_up."""
        client = self._clients[expected.part_count][expected.part]
        client.look_up(expected.key, message, deadline_s, on_done, calls)

    def _expect(self, parts: Sequence[ExpectedPart]) -> None:
        """Lets replicas join for a version.

        Raises:
            OSError, ValueError: the file of addresses cannot be read.
        """
        count = len(parts)
        if count not in self._discoveries:
            clients = self._clients.get(count) or [
                PartClient(part, count, self._connector(part), self._options, self._timers)
                for part in range(count)
            ]
            discovery = discover(
                self._source, count, lambda part, found: clients[part].set_addresses(found)
            )
            self._clients[count] = clients
            self._discoveries[count] = asyncio.ensure_future(discovery)
        for client, expected in zip(self._clients[count], parts, strict=True):
            client.expect(expected.key, expected.fingerprint)

    def _adopt_options(self, options: ConnectionOptions) -> None:
        """Makes new connections with ``options``, and replaces those that are open."""
        self._connection_options = options
        for client in self.clients():
            client.renew()

    def _connector(self, part: int) -> Connect:
        """Returns the function that connects to replicas of ``part`` with the present
        credentials."""
        source = self._source
        host = source.name.replace(PART, str(part)) if isinstance(source, DnsShards) else ""

        def connect(
            address: Address, on_ready: Callable[[], None], on_end: Callable[[str], None]
        ) -> ShardConnection:
            options = replace(self._connection_options, server_hostname=host)
            return ShardConnection(address, options, on_ready, on_end)

        return connect

    def _missing(self, parts: Sequence[ExpectedPart]) -> str:
        """Returns which parts of a version have no replica, and why; "" if all have one."""
        missing = []
        for client, expected in zip(self._clients[len(parts)], parts, strict=True):
            if not client.stats.replicas.get(expected.key):
                missing.append(client.why_unavailable(expected.key))
        return "; ".join(missing)

    def _expect_and_check(self, parts: Sequence[ExpectedPart]) -> str:
        """Lets replicas join for a version. Returns which parts have none yet, and why."""
        try:
            self._expect(parts)
        except (OSError, ValueError) as error:
            return str(error)
        return self._missing(parts)

    def _forget_unused(self) -> None:
        """Forgets versions that no engine has. Ends the connections to parts that none has, whose
        counts remain."""
        self._engines = [one for one in self._engines if one() is not None]
        used = {(len(one.expected_parts), one.expected_parts[0].key) for one in self._opened()}
        for count, clients in self._clients.items():
            for client in clients:
                for key in [*client.stats.replicas]:
                    if (count, key) not in used:
                        client.forget(key)
        for count in self._discoveries.keys() - {count for count, _ in used}:
            self._discoveries.pop(count).cancel()
            for client in self._clients[count]:
                client.close()

    # From other threads

    def open(self, version: ModelVersion) -> RouterEngine:
        """Returns the engine of ``version``, once each part has a replica; called in another thread
        than the event loop's.

        Raises:
            UnopenedError: a part has none within OPEN_S_MAX.
            StoreError: the tables of a router are damaged.
        """
        engine, until_s = self._engine(version), monotonic() + OPEN_S_MAX

        def add() -> str:
            self._engines.append(ref(engine, self._on_release))
            return self._expect_and_check(engine.expected_parts)

        missing = self._on_loop(add)
        while missing:
            if monotonic() >= until_s:
                raise UnopenedError(f"{version.path}: {missing}")
            sleep(POLL_S)
            missing = self._on_loop(partial(self._expect_and_check, engine.expected_parts))
        return engine

    def _on_release(self, engine: ref[RouterEngine]) -> None:
        """Forgets the version of a released engine; called in the thread that releases it."""
        assert self.loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its clients with it
            self.loop.call_soon_threadsafe(self._forget_unused)

    def expect_and_check(self, version: ModelVersion) -> str:
        """Connects to the shards of ``version``, and lets replicas join for it. Returns why they
        cannot serve it yet, "" if they can; called in another thread than the event loop's."""
        return self._on_loop(partial(self._expect_and_check, expected_parts(version)))

    def _on_loop(self, function: Callable[[], T]) -> T:
        """Calls ``function`` on the event loop and returns its result.

        Raises:
            UnopenedError: the event loop has not called it within CALL_S_MAX.
        """
        result: Future[T] = Future()
        assert self.loop is not None
        self.loop.call_soon_threadsafe(partial(_settle, result, function))
        try:
            return result.result(CALL_S_MAX)
        except TimeoutError as error:
            raise UnopenedError(f"the event loop was busy for {CALL_S_MAX:g} s") from error


def _settle(result: Future[T], function: Callable[[], T]) -> None:
    try:
        result.set_result(function())
    except Exception as error:
        result.set_exception(error)
