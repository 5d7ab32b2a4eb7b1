"""Admin operations on a running server: load, unload and reload models."""

from __future__ import annotations

import asyncio
from time import monotonic

from embedserve.config import ServeSettings
from embedserve.errors import RefusedError
from embedserve.processes.loading import check_names
from embedserve.processes.rollout_coordinator import MOVE_S_MAX
from embedserve.processes.store_watcher import VersionController, VersionResolver
from embedserve.processes.threads import run_in_daemon_thread
from embedserve.processes.version_manager import VersionManager
from embedserve_store import StoreError

LOOK_S = 0.05
"""Seconds between two checks of whether an operation is complete."""
ASK_AGAIN_S = 1.0
"""Seconds between two attempts to start a rollout, because another rollout may be in progress."""


class AdminService:
    """Admin operations in one process; with several workers all of them execute each operation."""

    def __init__(
        self,
        settings: ServeSettings,
        version_manager: VersionManager,
        controller: VersionController,
    ) -> None:
        self._settings = settings
        self._version_manager = version_manager
        self._mover = controller

    async def load(self, name: str) -> int:
        """Serves the version that ``name`` (NAME, NAME@VERSION or NAME@ALIAS) points to now, and
        returns its number once it serves. It replaces the current version of that name; other names
        are not affected.

        Raises:
            RefusedError: there is no such version, or it cannot be served.
        """
        try:
            check_names([name])
            version = await run_in_daemon_thread(
                "load", lambda: VersionResolver(self._settings).open(name)
            )
        except (StoreError, ValueError) as error:
            raise RefusedError(str(error), "model") from error
        number = version.manifest.version
        until_s = monotonic() + MOVE_S_MAX
        asked_s = float("-inf")
        self._mover.retry(name)
        self._version_manager.retry(name)
        while self._version_manager.number(name) != number:
            coming = self._version_manager.pending(name)
            if coming is not None and (coming.version, coming.state) == (number, "failed"):
                raise RefusedError(f"{name} version {number} stays out: {coming.reason}", "model")
            if monotonic() > until_s:
                raise RefusedError(f"{name} version {number} is not loaded yet", "model")
            if monotonic() - asked_s >= ASK_AGAIN_S:
                asked_s = monotonic()
                self._mover.add(name, version)
            await asyncio.sleep(LOOK_S)
        return number

    async def unload(self, name: str) -> None:
        """Stops serving ``name``; requests in its queue are still completed.

        Raises:
            RefusedError: ``name`` is not served, or nothing else is served.
        """
        served = ", ".join(self._version_manager.versions)
        if self._version_manager.number(name) is None:
            raise RefusedError(f"model is {name!r}: this server has {served}", "model")
        if len(self._version_manager.versions) == 1:
            raise RefusedError(f"model is {name!r}, and nothing else is served", "model")
        self._mover.remove(name)
        until_s = monotonic() + ASK_AGAIN_S * 10
        while self._version_manager.number(name) is not None:
            if monotonic() > until_s:
                raise RefusedError(f"{name} is served still", "model")
            await asyncio.sleep(LOOK_S)

    def reload(self) -> None:
        """Polls the store immediately, regardless of the ``follow`` setting. Rejected versions are
        retried."""
        self._mover.reload()
