"""Admin operations on a running server: load, unload and reload models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from embedserve.errors import ConflictError
from embedserve.processes.model_loading import check_names
from embedserve.processes.rollout.coordinator import ROLLOUT_S_MAX
from embedserve.processes.rollout.messages import AdminCommand, Operation, Target
from embedserve.processes.rollout.version_manager import VersionManager
from embedserve.processes.rollout.version_resolver import VersionResolver
from embedserve.processes.threads import run_in_daemon_thread
from embedserve_store import StoreError

UNLOAD_S_MAX = 10.0
"""Seconds that an unload may wait for the coordinator."""


class AdminService:
    """Admin operations that one process sends to the coordinator; they take effect in all."""

    def __init__(
        self,
        resolver: VersionResolver,
        version_manager: VersionManager,
        send: Callable[[AdminCommand], None],
    ) -> None:
        """
        Args:
            send: sends a command to the coordinator.
        """
        self._resolver = resolver
        self._version_manager = version_manager
        self._send = send

    async def load(self, name: str) -> int:
        """Serves the version that ``name`` (NAME, NAME@VERSION or NAME@ALIAS) points to now, and
        returns its number once it serves. It replaces the current version of that name; other names
        are not affected.

        Raises:
            ConflictError: there is no such version, it cannot be served, another one is requested
                meanwhile, by the store or an administrator, or the name is unloaded meanwhile.
        """
        try:
            check_names([name])
            version = await run_in_daemon_thread("load", lambda: self._resolver.open_current(name))
        except (StoreError, ValueError) as error:
            raise ConflictError(str(error), "model") from error
        number, before = version.manifest.version, self._version_manager.target(name)
        path, at_seq = str(version.path), version.at_seq
        self._send(AdminCommand(Operation.LOAD, name, number, path, at_seq))
        was_known = before is not None
        try:
            async with asyncio.timeout(ROLLOUT_S_MAX):
                while self._version_manager.number(name) != number:
                    now = self._version_manager.target(name)
                    if now is None and was_known:
                        raise ConflictError(f"{name} was unloaded meanwhile", "model")
                    if now is not None:
                        was_known = True
                        _check_load(name, number, before, now)
                        if number in (now.version, now.queued):  # the load has begun
                            before = now
                    await self._version_manager.wait_for_change()
        except TimeoutError:
            raise ConflictError(f"{name} version {number} is not loaded yet", "model") from None
        finally:
            self._resolver.forget(name)
            if self._version_manager.number(name) is None:  # forgets a new name that failed
                self._send(AdminCommand(Operation.UNLOAD, name))
        return number

    async def unload(self, name: str) -> None:
        """Stops serving ``name``; requests in its queue are still completed.

        Raises:
            ConflictError: ``name`` is not served, or nothing else is served.
        """
        served = ", ".join(self._version_manager.versions)
        if self._version_manager.number(name) is None:
            raise ConflictError(f"model is {name!r}: this server has {served}", "model")
        if len(self._version_manager.versions) == 1:
            raise ConflictError(f"model is {name!r}, and nothing else is served", "model")
        self._send(AdminCommand(Operation.UNLOAD, name))
        try:
            async with asyncio.timeout(UNLOAD_S_MAX):
                while self._version_manager.number(name) is not None:
                    await self._version_manager.wait_for_change()
        except TimeoutError:
            raise ConflictError(f"{name} is still served", "model") from None

    def reload(self) -> None:
        """Polls the store immediately, regardless of the ``follow`` setting. Versions with a final
        failure are retried."""
        self._send(AdminCommand(Operation.RELOAD))


def _check_load(name: str, number: int, before: Target | None, now: Target) -> None:
    """Raises ConflictError if the load of a version has failed, or was called off.

    Args:
        before: desired state when the load was requested; once it has begun, the last one that
            named its version.
    """
    failure = now.failure
    if failure is not None and failure.version == number and failure != (before and before.failure):
        raise ConflictError(f"{name} version {number} stays out: {failure.reason}", "model")
    has_begun = before is not None and number in (before.version, before.queued)
    if now.store_version not in (0, number, 0 if before is None else before.store_version):
        why = f"the store names {now.store_version} meanwhile"
    elif now.version not in (0, number, 0 if before is None else before.version):
        why = f"{now.version} was requested meanwhile"
    elif has_begun and number not in (now.version, now.queued):
        why = "it was called off meanwhile"
    else:
        return
    raise ConflictError(f"{name} version {number} is not loaded: {why}", "model")
