"""Watches the store: resolves the version of each model to serve, and opens it.

Errors do not interrupt serving. An error is logged once, and again when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from embedserve.config import ServeSettings
from embedserve.model_names import split_name
from embedserve.processes.rollout.messages import (
    REASON_CHARACTERS_MAX,
    Desired,
    Shares,
    StoreEntry,
    StoreReport,
)
from embedserve.processes.rollout.version_manager import VersionManager
from embedserve.processes.startup.loading import load_named, prepared
from embedserve.processes.threads import run_in_daemon_thread
from embedserve_store import ModelStore, ModelVersion, StoreError
from embedserve_store.errors import UnknownAliasError

logger = logging.getLogger(__name__)

SHARES_S_MAX = 10.0
"""Seconds that a start waits for the store to report the traffic shares. The watcher applies them
later anyway."""

T = TypeVar("T")
NOTHING_NEW = "looked at the store, as asked: nothing new%s"


class UnopenedError(StoreError):
    """A version cannot be opened now. It may become available, when its files are fully copied or
    repaired."""


class VersionResolver:
    """Resolves served names in the store. It is called in a thread, because a remote store is
    slow."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._store: ModelStore | None = None
        self._faults: dict[tuple[str, str], str] = {}
        self._opened: dict[str, ModelVersion] = {}

    def wanted(self, names: Iterable[str], *, is_all: bool = False) -> dict[str, StoreEntry]:
        """Returns the desired version of each followed name, or of all ``names`` if ``is_all``.
        Names that the store cannot resolve are left out."""
        wanted: dict[str, StoreEntry] = {}
        for name in names:
            if is_all or _is_followed(split_name(name)[1], self._settings.follow):
                found = partial(self._look_at, name, wanted)
                self._said_once("cannot be followed", name, found)
        return wanted

    def _look_at(self, name: str, wanted: dict[str, StoreEntry]) -> None:
        """Adds the desired version of ``name`` to ``wanted``; raises StoreError."""
        try:
            wanted[name] = self._wanted(name)
        except UnknownAliasError:
            wanted[name] = StoreEntry(0)  # the current version stays, without a share
            raise

    def _wanted(self, name: str) -> StoreEntry:
        model, tag = split_name(name)
        store = self._opened_store()
        if not tag or tag.isdigit():
            return _entry(store.resolve(model, tag or None))
        alias = store.alias(model, tag)
        assert alias.version is not None  # the store rejects an alias without a version
        return _entry(alias.version, alias.share, alias.shadow)

    def open(self, name: str) -> ModelVersion:
        """Opens the version that ``name`` points to now. It is prepared and kept as in ``load``.

        Raises:
            StoreError: there is no such version, it differs from its published state, or it does
                not fit into memory.
        """
        try:
            version = load_named(self._new_store(), name)
            version = prepared(self._settings, {name: version}, is_shown=False)[name]
        except (OSError, MemoryError) as error:
            raise StoreError(f"{name}: {error}") from error
        self._opened[name] = version
        return version

    def load(self, name: str, number: int) -> ModelVersion:
        """Opens the version, and keeps it until ``forget``. From a remote store it is first pulled;
        it is verified or made resident according to the settings.

        Raises:
            UnopenedError: the version cannot be opened now.
            StoreError: the version differs from its published state, or does not fit into memory.
        """
        opened = self._opened.pop(name, None)
        if opened is not None and opened.manifest.version == number:
            self._opened[name] = opened
            return opened
        del opened
        try:
            version = self._opened_store().load(split_name(name)[0], number)
        except (StoreError, OSError) as error:
            raise UnopenedError(str(error)) from error
        try:
            version = prepared(self._settings, {name: version}, is_shown=False)[name]
        except (OSError, MemoryError) as error:
            raise StoreError(f"{version.path}: {error}") from error
        self._opened[name] = version
        return version

    def take(self, name: str, number: int) -> ModelVersion:
        """Returns the version as ``load`` does, and does not keep it."""
        version = self.load(name, number)
        self.forget(name)
        return version

    def forget(self, name: str) -> None:
        """Releases the version that was opened for ``name``."""
        self._opened.pop(name, None)

    def _opened_store(self) -> ModelStore:
        if self._store is None:
            self._store = self._new_store()
        return self._store

    def _new_store(self) -> ModelStore:
        cache = self._settings.cache
        return ModelStore(self._settings.store, Path(cache) if cache else None)

    def _said_once(self, what: str, name: str, work: Callable[[], T]) -> T | None:
        """Returns the result of ``work``, or None if it fails. The reason is logged when it
        changes, and when it is gone."""
        try:
            given = work()
        except (StoreError, OSError) as error:
            if self._faults.get((what, name)) != str(error):
                self._faults[what, name] = str(error)
                logger.error("%s %s: %s", name, what, error)
            return None
        if self._faults.pop((what, name), None):
            logger.info("%s %s: no more", name, what)
        return given


def _entry(number: int, share: float = 0.0, shadow: float = 0.0) -> StoreEntry:
    return StoreEntry(number, Shares(number, share, shadow))


def _is_followed(tag: str, follow: str) -> bool:
    if not tag:
        return follow == "latest"
    return follow != "none" and not tag.isdigit()


class StoreWatcher:
    """Polls the store every ``follow_s``, in the process that watches it, and reports the desired
    versions to the coordinator."""

    def __init__(
        self,
        settings: ServeSettings,
        resolver: VersionResolver,
        version_manager: VersionManager,
        send: Callable[[StoreReport], None],
        stop: asyncio.Event,
    ) -> None:
        """
        Args:
            send: sends a report to the coordinator.
            stop: event that ends the watching of the store.
        """
        self._stop = stop
        self._every_s = None if settings.follow == "none" else settings.follow_s
        self._resolver = resolver
        self._version_manager = version_manager
        self._send = send
        self._polls = 0
        self._poll_requested = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    def apply(self, desired: Desired) -> None:
        """Begins to watch the store if this process is to, or polls it now if that is requested."""
        if not desired.watches_store:
            return
        if self._watching is None:
            self._polls = desired.polls
            self._watching = asyncio.create_task(self._watch())
        if desired.polls != self._polls:
            self._polls = desired.polls
            self._poll_requested.set()

    async def _watch(self) -> None:
        polling = asyncio.create_task(self._poll_periodically())
        await self._stop.wait()
        polling.cancel()

    async def _poll_periodically(self) -> None:
        while True:
            is_requested = self._poll_requested.is_set()
            self._poll_requested.clear()
            try:
                if is_requested or self._every_s is not None:
                    await self.poll(is_all=is_requested)
            except Exception:
                logger.exception("following the store failed; it is tried again")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poll_requested.wait(), self._every_s)

    async def poll(self, *, is_all: bool = False) -> None:
        """Polls the store for the followed names, or for all served names if ``is_all``. In that
        case it logs when there is nothing new."""
        names = tuple(self._version_manager.versions)
        wanted = await run_in_daemon_thread(
            "follow", partial(self._resolver.wanted, names, is_all=is_all)
        )
        if is_all and not any(self._is_new(name, one) for name, one in wanted.items()):
            unknown = ", ".join(name for name in names if name not in wanted)
            logger.info(NOTHING_NEW, f"; it cannot tell of {unknown}" if unknown else "")
        self._send(StoreReport(wanted))
        for name, one in wanted.items():
            if self._is_to_be_opened(name, one.wanted):
                opened = await self._open(name, one)
                self._send(StoreReport({name: opened}))
            elif not self._is_loading(name):
                self._resolver.forget(name)

    def _is_new(self, name: str, one: StoreEntry) -> bool:
        if one.wanted not in (0, self._version_manager.number(name)):
            return True
        target = self._version_manager.target(name)
        before = target.shares if target is not None and target.shares is not None else Shares(0)
        return (one.shares.traffic, one.shares.shadow) != (before.traffic, before.shadow)

    def _is_to_be_opened(self, name: str, number: int) -> bool:
        target = self._version_manager.target(name)
        if target is None or number in (0, target.version, self._version_manager.number(name)):
            return False
        failure = target.failure
        return failure is None or not failure.is_final or failure.version != number

    def _is_loading(self, name: str) -> bool:
        target = self._version_manager.target(name)
        return target is not None and target.version != self._version_manager.number(name)

    async def _open(self, name: str, one: StoreEntry) -> StoreEntry:
        """Returns ``one`` with the folder of its version, or with the reason why it cannot be
        opened."""
        load = partial(self._resolver.load, name, one.wanted)
        try:
            version = await run_in_daemon_thread("follow", load)
        except StoreError as error:
            is_final = not isinstance(error, UnopenedError)
            reason = str(error)
        except Exception as error:
            logger.exception("%s version %d cannot be opened", name, one.wanted)
            is_final, reason = True, f"{type(error).__name__}: {error}"
        else:
            return replace(one, path=str(version.path))
        return replace(one, reason=reason[:REASON_CHARACTERS_MAX], is_final=is_final)


async def begin_shares(settings: ServeSettings, version_manager: VersionManager) -> None:
    """Applies the traffic shares of the served versions before the first request is accepted. They
    may have been set before the start."""
    wanted = partial(VersionResolver(settings).wanted, tuple(version_manager.versions))
    try:
        async with asyncio.timeout(SHARES_S_MAX):
            found = await run_in_daemon_thread("shares", wanted)
    except TimeoutError:
        logger.warning("the store has not told the shares in %g s: they begin later", SHARES_S_MAX)
        return
    except Exception:
        logger.exception("the shares cannot be read: they begin later")
        return
    for name, one in found.items():
        version_manager.share(name, one.shares)
