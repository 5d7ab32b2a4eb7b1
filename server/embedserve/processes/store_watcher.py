"""Watches the store: resolves the version of each model to serve, and opens it.

Errors do not interrupt serving. An error is logged once, and again when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from embedserve.config import ServeSettings
from embedserve.model_names import split_name
from embedserve.processes.loading import load_named, prepared
from embedserve.processes.rollout_coordinator import REFUSED, REMOVED, SWITCHED
from embedserve.processes.threads import run_in_daemon_thread
from embedserve.processes.version_manager import VersionManager
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


@dataclass(frozen=True)
class DesiredVersion:
    """The version that a name should serve, as set in the store. The number is None if the name is
    no longer an alias. The shares are the percentages of its alias."""

    number: int | None
    share: float = 0.0
    shadow: float = 0.0


class VersionResolver:
    """Resolves served names in the store. It is called in a thread, because a remote store is
    slow."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._store: ModelStore | None = None
        self._faults: dict[tuple[str, str], str] = {}
        self._opened: dict[str, ModelVersion] = {}

    def wanted(self, names: Iterable[str], *, is_all: bool = False) -> dict[str, DesiredVersion]:
        """Returns the desired version of each followed name, or of all ``names`` if ``is_all``.
        Names that the store cannot resolve are left out."""
        wanted: dict[str, DesiredVersion] = {}
        for name in names:
            if is_all or _is_followed(split_name(name)[1], self._settings.follow):
                found = partial(self._look_at, name, wanted)
                self._said_once("cannot be followed", name, found)
        return wanted

    def _look_at(self, name: str, wanted: dict[str, DesiredVersion]) -> None:
        """Adds the desired version of ``name`` to ``wanted``; raises StoreError."""
        try:
            wanted[name] = self._wanted(name)
        except UnknownAliasError:
            wanted[name] = DesiredVersion(None)  # the current version stays, without a share
            raise

    def _wanted(self, name: str) -> DesiredVersion:
        model, tag = split_name(name)
        store = self._opened_store()
        if not tag or tag.isdigit():
            return DesiredVersion(store.resolve(model, tag or None))
        alias = store.alias(model, tag)
        assert alias.version is not None  # the store rejects an alias without a version
        return DesiredVersion(alias.version, alias.share, alias.shadow)

    def open(self, name: str) -> ModelVersion:
        """Opens the version that ``name`` points to now. It is prepared as in ``load``.

        Raises:
            StoreError: there is no such version, it differs from its published state, or it does
                not fit into memory.
        """
        try:
            version = load_named(self._opened_store(), name)
            return prepared(self._settings, {name: version}, is_shown=False)[name]
        except (OSError, MemoryError) as error:
            raise StoreError(f"{name}: {error}") from error

    def load(self, name: str, number: int) -> ModelVersion:
        """Opens the version. From a remote store it is first pulled; it is verified or made
        resident according to the settings.

        Raises:
            UnopenedError: the version cannot be opened now.
            StoreError: the version differs from its published state, or does not fit into memory.
        """
        if name in self._opened and self._opened[name].manifest.version == number:
            return self._opened[name]
        self.forget(name)
        try:
            version = self._opened_store().load(split_name(name)[0], number)
        except (StoreError, OSError) as error:
            raise UnopenedError(str(error)) from error
        try:
            self._opened |= prepared(self._settings, {name: version}, is_shown=False)
        except (OSError, MemoryError) as error:
            raise StoreError(f"{version.path}: {error}") from error
        return self._opened[name]

    def forget(self, name: str) -> None:
        """Releases the version that was opened for ``name``."""
        self._opened.pop(name, None)

    def _opened_store(self) -> ModelStore:
        if self._store is None:
            cache = self._settings.cache
            self._store = ModelStore(self._settings.store, Path(cache) if cache else None)
        return self._store

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


def _is_followed(tag: str, follow: str) -> bool:
    if not tag:
        return follow == "latest"
    return follow != "none" and not tag.isdigit()


class VersionController(Protocol):
    """Controls which versions a process, or all workers together, serve."""

    def set_desired(self, name: str, number: int) -> None:
        """Sets version ``number``, to which the store points, as desired."""

    def share(self, name: str, number: int | None, share: float, shadow: float) -> None:
        """Sets the share of the requests that name only the model, and the share of the other
        versions' batches that are shadowed. Both are percentages for version ``number`` of
        ``name``, and apply from when that version serves. With None they apply immediately to the
        version that serves."""

    async def move(self, name: str, version: ModelVersion) -> None:
        """Starts a rollout to ``version``, which is opened. Called again at each poll until the
        rollout is done."""

    def reject(self, name: str, number: int, reason: str) -> None:
        """Rejects version ``number``, which cannot be served."""

    def report_unopened(self, name: str, number: int, reason: str) -> None:
        """Reports that version ``number`` cannot be opened now; the next poll retries it."""

    def retry(self, name: str) -> None:
        """Permits a rejected version to be retried."""

    def add(self, name: str, version: ModelVersion) -> None:
        """Starts a rollout to ``version``, even if ``name`` is not served yet. Ignored while
        another rollout is in progress."""

    def remove(self, name: str) -> None:
        """Stops serving ``name``, unless nothing else is served."""

    def reload(self) -> None:
        """Polls the store immediately for all served names, regardless of the ``follow``
        setting."""


class LocalController:
    """Controls the versions of a process that has no other workers."""

    def __init__(self, version_manager: VersionManager) -> None:
        self._version_manager = version_manager
        self._adding: set[asyncio.Task[None]] = set()
        self.reload: Callable[[], None] = _do_nothing

    def set_desired(self, name: str, number: int) -> None:
        self._version_manager.set_desired(name, number)

    def share(self, name: str, number: int | None, share: float, shadow: float) -> None:
        self._version_manager.share(name, number, share, shadow)

    async def move(self, name: str, version: ModelVersion) -> None:
        number = version.manifest.version
        before = self._version_manager.number(name)
        try:
            await self._version_manager.prepare(name, version)
        except StoreError as error:
            self.reject(name, number, str(error))
        else:
            if self._version_manager.activate(name, number):
                logger.info(SWITCHED, name, number, before or "none")

    def reject(self, name: str, number: int, reason: str) -> None:
        self._version_manager.reject(name, number, reason)
        logger.error(REFUSED, name, number, reason)

    def report_unopened(self, name: str, number: int, reason: str) -> None:
        if self._version_manager.report_unopened(name, number, reason):
            logger.error(REFUSED, name, number, reason)

    def retry(self, name: str) -> None:
        self._version_manager.retry(name)

    def add(self, name: str, version: ModelVersion) -> None:
        coming = self._version_manager.pending(name)
        if coming is None or coming.state == "failed":
            task = asyncio.create_task(self.move(name, version))
            self._adding.add(task)
            task.add_done_callback(self._adding.discard)

    def remove(self, name: str) -> None:
        if self._version_manager.remove(name):
            logger.info(REMOVED, name)


def _do_nothing() -> None:
    return None


class StoreWatcher:
    """Polls the store every ``follow_s``, and starts rollouts to the desired versions."""

    def __init__(
        self, watch: VersionResolver, version_manager: VersionManager, controller: VersionController
    ) -> None:
        self._watch = watch
        self._version_manager = version_manager
        self._mover = controller
        self._asked = asyncio.Event()
        self._shares: dict[str, tuple[float, float]] = {}

    def poll_now(self) -> None:
        """Requests an immediate poll of all served names, regardless of the ``follow`` setting.
        Rejected versions are retried."""
        self._asked.set()

    async def run(self, stop: asyncio.Event, settings: ServeSettings) -> None:
        """Polls the store until ``stop`` is set."""
        every_s = None if settings.follow == "none" else settings.follow_s
        stopping = asyncio.create_task(stop.wait())
        while not stop.is_set():
            is_asked = self._asked.is_set()
            self._asked.clear()
            try:
                if is_asked:
                    self._forgive()
                if is_asked or every_s is not None:
                    await self.poll(is_all=is_asked)
            except Exception:
                logger.exception("following the store failed; it goes on")
            asked = asyncio.create_task(self._asked.wait())
            await asyncio.wait(
                (stopping, asked), timeout=every_s, return_when=asyncio.FIRST_COMPLETED
            )
            asked.cancel()
        stopping.cancel()

    def _forgive(self) -> None:
        for name in self._version_manager.versions:
            if self._version_manager.rejected(name) is not None:
                self._mover.retry(name)

    async def poll(self, *, is_all: bool = False) -> None:
        """Polls the store for the followed names, or for all served names if ``is_all``. In that
        case it logs when there is nothing new."""
        names = tuple(self._version_manager.versions)
        wanted = await run_in_daemon_thread(
            "follow", partial(self._watch.wanted, names, is_all=is_all)
        )
        if is_all and not any(self._is_new(name, one) for name, one in wanted.items()):
            unknown = ", ".join(name for name in names if name not in wanted)
            logger.info(NOTHING_NEW, f"; it cannot tell of {unknown}" if unknown else "")
        for name, one in wanted.items():
            self._mover.share(name, one.number, one.share, one.shadow)
            self._shares[name] = one.share, one.shadow
            if one.number is None:
                continue
            self._mover.set_desired(name, one.number)
            if one.number in (
                self._version_manager.number(name),
                self._version_manager.rejected(name),
            ):
                self._watch.forget(name)
            else:
                await self._move(name, one.number)

    def _is_new(self, name: str, one: DesiredVersion) -> bool:
        if one.number not in (None, self._version_manager.number(name)):
            return True
        return self._shares.get(name, (0.0, 0.0)) != (one.share, one.shadow)

    async def _move(self, name: str, number: int) -> None:
        try:
            version = await run_in_daemon_thread("follow", partial(self._watch.load, name, number))
        except UnopenedError as error:
            self._mover.report_unopened(name, number, str(error))
        except StoreError as error:
            self._mover.reject(name, number, str(error))
        except Exception as error:
            logger.exception("%s version %d cannot be opened", name, number)
            self._mover.reject(name, number, f"{type(error).__name__}: {error}")
        else:
            await self._mover.move(name, version)


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
        version_manager.share(name, one.number, one.share, one.shadow)


@contextlib.asynccontextmanager
async def followed(
    settings: ServeSettings, version_manager: VersionManager, stop: asyncio.Event
) -> AsyncIterator[LocalController]:
    """Watches the store within its block, until ``stop`` is set. Yields the controller of this
    process's versions."""
    alone = LocalController(version_manager)
    watcher = StoreWatcher(VersionResolver(settings), version_manager, alone)
    alone.reload = watcher.poll_now
    task = asyncio.create_task(watcher.run(stop, settings))
    try:
        yield alone
    finally:
        task.cancel()
