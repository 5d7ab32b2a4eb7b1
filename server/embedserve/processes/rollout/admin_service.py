"""Admin operations on a running server: load, unload and reload models."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from msgspec.structs import replace

from embedserve.daemon_threads import run_in_daemon_thread
from embedserve.errors import ConflictError
from embedserve.processes.model_loading import check_names
from embedserve.processes.rollout.coordinator import ROLLOUT_S_MAX
from embedserve.processes.rollout.messages import AdminCommand, Operation, Target
from embedserve.processes.rollout.version_manager import VersionManager
from embedserve.processes.rollout.version_resolver import VersionResolver
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
        self._serials = itertools.count(1)

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
        number = version.manifest.version
        serial = self._send_command(
            AdminCommand(Operation.LOAD, name, number, str(version.path), version.at_seq)
        )
        begun: Target | None = None  # the last state that named the version to load
        try:
            async with asyncio.timeout(ROLLOUT_S_MAX):
                while self._version_manager.command_handled < serial:
                    await self._version_manager.wait_for_change()
                while self._version_manager.number(name) != number:
                    begun = _check_load(name, number, begun, self._version_manager.target(name))
                    await self._version_manager.wait_for_change()
        except TimeoutError:
            raise ConflictError(f"{name} version {number} is not loaded yet", "model") from None
        finally:
            self._resolver.forget(name)
            if self._version_manager.number(name) is None:  # forgets a new name that failed
                self._send_command(AdminCommand(Operation.UNLOAD, name))
        return number

    async def unload(self, name: str) -> None:
        """Stops serving ``name``; requests in its queue are still completed.

        Raises:
            ConflictError: ``name`` is not served, or nothing else is served.
        """
        served = ", ".join(self._version_manager.versions)
        if self._version_manager.number(name) is None:
            raise ConflictError(f"model is {name!r}: this server has {served}", "model")
        serial = self._send_command(AdminCommand(Operation.UNLOAD, name))
        try:
            async with asyncio.timeout(UNLOAD_S_MAX):
                while self._version_manager.command_handled < serial:
                    await self._version_manager.wait_for_change()
                if self._version_manager.target(name) is not None:
                    raise ConflictError(f"model is {name!r}, and nothing else is served", "model")
                while self._version_manager.number(name) is not None:
                    await self._version_manager.wait_for_change()
        except TimeoutError:
            raise ConflictError(f"{name} is still served", "model") from None

    def reload(self) -> None:
        """Polls the store immediately, regardless of the ``follow`` setting. Versions with a final
        failure are retried."""
        self._send_command(AdminCommand(Operation.RELOAD))

    def _send_command(self, command: AdminCommand) -> int:
        """Sends a command to the coordinator, and returns the serial number that it gets."""
        serial = next(self._serials)
        self._send(replace(command, serial=serial))
        return serial


def _check_load(name: str, number: int, begun: Target | None, now: Target | None) -> Target:
    """Returns the desired state ``now`` of a load that the coordinator has handled.

    Args:
        begun: desired state at the check before; None at the first one.

    Raises:
        ConflictError: the load has failed, or was called off.
    """
    if now is None:
        raise ConflictError(f"{name} was unloaded meanwhile", "model")
    failure = now.failure
    if failure is not None and failure.version == number:
        raise ConflictError(f"{name} version {number} stays out: {failure.reason}", "model")
    if now.store_version not in (0, number):
        why = f"the store names {now.store_version} meanwhile"
    elif number in (now.version, now.queued):
        return now
    elif begun is not None and now.version != begun.version:
        why = f"{now.version} was requested meanwhile"
    else:
        why = "it was called off meanwhile"
    raise ConflictError(f"{name} version {number} is not loaded: {why}", "model")
