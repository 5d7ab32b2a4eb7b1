"""Watches the store: polls which version each served name points to, and opens new ones.

Errors do not interrupt serving. An error is logged once, and again when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial

from embedserve.config import ServeSettings
from embedserve.daemon_threads import run_in_daemon_thread
from embedserve.processes.rollout.messages import (
    REASON_CHARACTERS_MAX,
    AliasSettings,
    Desired,
    StoreEntry,
    StoreReport,
)
from embedserve.processes.rollout.shard_versions import ShardVersions
from embedserve.processes.rollout.version_manager import VersionManager
from embedserve.processes.rollout.version_resolver import VersionResolver
from embedserve_store import StoreError
from embedserve_store.errors import TRANSIENT, is_process_limit

logger = logging.getLogger(__name__)

SHARES_S_MAX = 10.0
"""Seconds that a start waits for the store to report the traffic shares. The watcher's first poll
applies those that are followed later."""
NOTHING_NEW = "polled the store on request: nothing new%s"


class StoreWatcher:
    """Polls the store every ``follow_s``, in the process that watches it, and reports the
    versions that it names to the coordinator.

    A poll does not wait for the versions that it finds, because a pull may take minutes. One at a
    time is opened for each name.
    """

    def __init__(
        self,
        settings: ServeSettings,
        resolver: VersionResolver,
        version_manager: VersionManager,
        send: Callable[[StoreReport], None],
        stop: asyncio.Event,
        shard_versions: ShardVersions | None = None,
    ) -> None:
        """
        Args:
            send: sends a report to the coordinator.
            stop: event that ends the watching of the store.
            shard_versions: versions of a shard, which are updated after each poll; None in others.
        """
        self._shard_versions = shard_versions
        self._stop = stop
        self._every_s = None if settings.follow == "none" else settings.follow_s
        self._resolver = resolver
        self._version_manager = version_manager
        self._send = send
        self._polls_requested = self._poll_to_report = 0
        self._poll_requested = asyncio.Event()
        self._reading = asyncio.Lock()  # reports go out in the order in which the store was read
        self._watching: asyncio.Task[None] | None = None
        self._openings: dict[str, asyncio.Task[None]] = {}
        self._polled = asyncio.Event()

    def apply(self, desired: Desired) -> None:
        """Begins to watch the store if ``desired`` names this process for it. Polls it now if
        ``desired`` requests another poll."""
        if not desired.watches_store:
            return
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        if desired.polls_requested != self._polls_requested:
            self._polls_requested = desired.polls_requested
            self._poll_requested.set()

    async def _watch(self) -> None:
        tasks = [asyncio.create_task(self._poll_periodically())]
        if self._shard_versions is not None:
            tasks.append(asyncio.create_task(self._update_after_polls(self._shard_versions)))
        await self._stop.wait()
        for task in (*tasks, *self._openings.values()):
            task.cancel()

    async def _poll_periodically(self) -> None:
        while True:
            is_requested = self._poll_requested.is_set()
            self._poll_requested.clear()
            if is_requested or self._every_s is not None:
                await _run_and_log_error(self.poll(is_all=is_requested))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poll_requested.wait(), self._every_s)

    async def poll(self, *, is_all: bool = False) -> None:
        """Polls the store for the followed names, or for all served names if ``is_all``. In that
        case it logs when there is nothing new."""
        names, request = tuple(self._version_manager.versions), self._polls_requested
        async with self._reading:
            entries = await self._resolve(names, is_all=is_all)
            if is_all and not any(self._is_new(name, entry) for name, entry in entries.items()):
                unknown = ", ".join(name for name in names if name not in entries)
                logger.info(NOTHING_NEW, f"; it cannot tell of {unknown}" if unknown else "")
            self._send(StoreReport(entries))
        for name, entry in entries.items():
            if name in self._openings:
                continue
            if self._is_to_be_opened(name, entry.version):
                self._openings[name] = asyncio.create_task(self._open(name, entry.version))
            elif not self._is_loading(name):
                self._resolver.forget(name)
        if is_all:
            self._poll_to_report = request
        self._report_poll()
        self._polled.set()

    async def _resolve(self, names: Iterable[str], *, is_all: bool) -> dict[str, StoreEntry]:
        resolve = partial(self._resolver.resolve, names, is_all=is_all)
        return await run_in_daemon_thread("follow", resolve)

    def _report_poll(self) -> None:
        """Reports the end of a requested poll, once the versions that it found were opened."""
        if self._poll_to_report and not self._openings:
            self._send(StoreReport({}, self._poll_to_report))
            self._poll_to_report = 0

    def _is_new(self, name: str, entry: StoreEntry) -> bool:
        if entry.version not in (0, self._version_manager.number(name)):
            return True
        target = self._version_manager.target(name)
        before = (target and target.alias_settings) or AliasSettings(0)
        return replace(entry.alias_settings, version=0) != replace(before, version=0)

    def _is_to_be_opened(self, name: str, number: int) -> bool:
        target = self._version_manager.target(name)
        if target is None or number in (0, target.version, self._version_manager.number(name)):
            return False
        failure = target.failure
        return failure is None or not failure.is_final or failure.version != number

    def _is_loading(self, name: str) -> bool:
        target = self._version_manager.target(name)
        return target is not None and target.version != self._version_manager.number(name)

    async def _update_after_polls(self, shard_versions: ShardVersions) -> None:
        while True:
            await self._polled.wait()
            self._polled.clear()
            await _run_and_log_error(shard_versions.update())

    async def _open(self, name: str, number: int) -> None:
        await _run_and_log_error(self._open_and_report(name, number))
        del self._openings[name]
        if self._version_manager.target(name) is None:  # unloaded meanwhile
            self._resolver.forget(name)
        self._report_poll()

    async def _open_and_report(self, name: str, number: int) -> None:
        """Opens the version that the store names, and reports its folder, or why it cannot be
        opened. The store is read again afterwards, because a pull may take minutes: a version that
        it no longer names is released, and the one that it names is opened instead."""
        while self._is_to_be_opened(name, number):
            opened = await self._try_open(name, number)
            async with self._reading:
                entry = (await self._resolve((name,), is_all=True)).get(name)
                if entry is None:  # the next poll tries again
                    return
                if entry.version == number:
                    self._send(
                        StoreReport({name: replace(opened, alias_settings=entry.alias_settings)})
                    )
                    return
                self._resolver.forget(name)
                self._send(StoreReport({name: entry}))
            number = entry.version

    async def _try_open(self, name: str, number: int) -> StoreEntry:
        """Returns an entry with the folder of the version, or with the reason why it cannot be
        opened."""
        open_number = partial(self._resolver.open_number, name, number)
        try:
            version = await run_in_daemon_thread("follow", open_number)
        except (StoreError, OSError) as error:
            is_final = not isinstance(error, TRANSIENT)
            reason = str(error)
        except Exception as error:
            logger.exception("%s version %d cannot be opened", name, number)
            is_final = not is_process_limit(error)  # such as of a thread that a pull needs
            reason = f"{type(error).__name__}: {error}"
        else:
            return StoreEntry(number, path=str(version.path))
        return StoreEntry(number, reason=reason[:REASON_CHARACTERS_MAX], is_final=is_final)


async def _run_and_log_error(work: Awaitable[None]) -> None:
    """Runs ``work``, and logs an error that it raises."""
    try:
        await work
    except Exception:
        logger.exception("following the store failed; it is tried again")


async def apply_initial_alias_settings(
    settings: ServeSettings, version_manager: VersionManager
) -> None:
    """Applies the traffic shares of the served aliases before this process accepts a request. They
    may have been set before its start. With follow=none none applies until a reload."""
    resolve = partial(VersionResolver(settings).resolve, tuple(version_manager.versions))
    try:
        async with asyncio.timeout(SHARES_S_MAX):
            entries = await run_in_daemon_thread("shares", resolve)
    except TimeoutError:
        logger.warning(
            "the store did not return the shares within %g s: they begin later", SHARES_S_MAX
        )
        return
    except Exception:
        logger.exception("the shares cannot be read: they begin later")
        return
    for name, entry in entries.items():
        version_manager.apply_alias_settings(name, entry.alias_settings)
