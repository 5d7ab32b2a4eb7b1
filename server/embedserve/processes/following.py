"""Follows the store: looks which version of a model is to be served now, and opens it.

Whatever goes wrong here, what is served goes on. A fault is said once, and once more when it is
gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from embedserve.config import ServeSettings
from embedserve.processes.loading import named_versions, prepared
from embedserve.processes.moves import REFUSED, SWITCHED
from embedserve.processes.rollout import Rollout
from embedserve.processes.threads import in_thread
from embedserve_store import ModelStore, ModelVersion, StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StoreWatch:
    """What a store says of the models that are followed; asked in a thread, for a remote store
    takes its time."""

    def __init__(self, settings: ServeSettings, served: Iterable[str]) -> None:
        """
        Args:
            served: the models that are served.
        """
        named = named_versions(settings) or dict.fromkeys(served)
        self._settings = settings
        self._followed = {
            model: version
            for model, version in named.items()
            if _is_followed(version, settings.follow)
        }
        self._store: ModelStore | None = None
        self._faults: dict[tuple[str, str], str] = {}
        self._opened: dict[str, ModelVersion] = {}

    def wanted(self) -> dict[str, int]:
        """The number of the version that is to be served, by model; without models of which the
        store cannot tell now."""
        wanted = {}
        for model, version in self._followed.items():
            resolve = partial(self._opened_store().resolve, model, version)
            number = self._said_once("cannot be followed", model, resolve)
            if number is not None:
                wanted[model] = number
        return wanted

    def load(self, model: str, number: int) -> ModelVersion | None:
        """The version, pulled first where the store is remote, and verified or made resident where
        that is asked for; None while it cannot be opened, as where it has not come whole.

        Raises:
            StoreError: it is not as it was published, or does not fit into memory.
        """
        if model in self._opened and self._opened[model].manifest.version == number:
            return self._opened[model]
        self.forget(model)
        load = partial(self._opened_store().load, model, number)
        version = self._said_once("cannot move", model, load)
        if version is None:
            return None
        try:
            self._opened |= prepared(self._settings, {model: version}, is_shown=False)
        except (OSError, MemoryError) as error:
            raise StoreError(f"{version.path}: {error}") from error
        return self._opened[model]

    def forget(self, model: str) -> None:
        """Lets go of what was opened of ``model``."""
        self._opened.pop(model, None)

    def _opened_store(self) -> ModelStore:
        if self._store is None:
            cache = self._settings.cache
            self._store = ModelStore(self._settings.store, Path(cache) if cache else None)
        return self._store

    def _said_once(self, what: str, model: str, work: Callable[[], T]) -> T | None:
        """What ``work`` gives; where it fails None, and why is logged when that is new, and when it
        is gone."""
        try:
            given = work()
        except (StoreError, OSError) as error:
            if self._faults.get((what, model)) != str(error):
                self._faults[what, model] = str(error)
                logger.error("%s %s: %s", model, what, error)
            return None
        if self._faults.pop((what, model), None):
            logger.info("%s %s: no more", model, what)
        return given


def _is_followed(version: str | None, follow: str) -> bool:
    if version is None:
        return follow == "latest"
    return follow != "none" and not version.isdigit()


class Mover(Protocol):
    """Has a process, or all workers together, answer with another version."""

    def want(self, model: str, number: int) -> None:
        """The store says that version ``number`` is to answer."""

    async def move(self, version: ModelVersion) -> None:
        """To ``version``, which is opened; asked again, while it has not happened, at each look."""

    def refuse(self, model: str, number: int, reason: str) -> None:
        """Not to version ``number``, which cannot be opened."""


class Alone:
    """Moves a process that has no others beside it."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout

    def want(self, model: str, number: int) -> None:
        self._rollout.want(model, number)

    async def move(self, version: ModelVersion) -> None:
        model, number = version.manifest.model, version.manifest.version
        before = self._rollout.number(model)
        try:
            await self._rollout.prepare(version)
        except StoreError as error:
            self.refuse(model, number, str(error))
        else:
            if self._rollout.switch(model, number):
                logger.info(SWITCHED, model, number, before)

    def refuse(self, model: str, number: int, reason: str) -> None:
        self._rollout.refuse(model, number, reason)
        logger.error(REFUSED, model, number, reason)


class Follower:
    """Looks at the store now and then, and has the process move to what it says."""

    def __init__(self, watch: StoreWatch, rollout: Rollout, mover: Mover) -> None:
        self._watch = watch
        self._rollout = rollout
        self._mover = mover

    async def run(self, stop: asyncio.Event, every_s: float) -> None:
        """Until ``stop`` is set."""
        while not await _is_set_within(stop, every_s):
            try:
                await self.look()
            except Exception:
                logger.exception("following the store failed; it goes on")

    async def look(self) -> None:
        wanted = await in_thread("follow", self._watch.wanted)
        for model, number in wanted.items():
            self._mover.want(model, number)
            if number in (self._rollout.number(model), self._rollout.refused(model)):
                self._watch.forget(model)
            else:
                await self._move(model, number)

    async def _move(self, model: str, number: int) -> None:
        try:
            version = await in_thread("follow", partial(self._watch.load, model, number))
        except StoreError as error:
            self._mover.refuse(model, number, str(error))
        except Exception as error:
            logger.exception("%s version %d cannot be opened", model, number)
            self._mover.refuse(model, number, f"{type(error).__name__}: {error}")
        else:
            if version is not None:
                await self._mover.move(version)


@contextlib.asynccontextmanager
async def followed(
    settings: ServeSettings, rollout: Rollout, mover: Mover, stop: asyncio.Event
) -> AsyncIterator[None]:
    """Within, the store is followed, until ``stop`` is set."""
    follower = Follower(StoreWatch(settings, rollout.versions), rollout, mover)
    task = asyncio.create_task(follower.run(stop, settings.follow_s))
    try:
        yield
    finally:
        task.cancel()


async def _is_set_within(stop: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
    return stop.is_set()
