"""A worker's part in a rollout that all workers do together (rollout_coordinator.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from embedserve.config import ServeSettings
from embedserve.processes.loading import open_folder
from embedserve.processes.rollout_messages import (
    RolloutMessage,
    RolloutStep,
    WorkerChannel,
    WorkerMessage,
    refused,
    unopened,
)
from embedserve.processes.store_watcher import StoreWatcher, VersionResolver
from embedserve.processes.threads import run_in_daemon_thread
from embedserve.processes.version_manager import VersionManager
from embedserve_store import ModelVersion, StoreError


class SupervisorController:
    """Version controller of a store watcher that forwards to the supervisor, which then rolls out
    on all workers."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self._wanted: dict[str, int] = {}
        self._shares: dict[str, RolloutMessage] = {}

    def set_desired(self, name: str, number: int) -> None:
        if self._wanted.get(name) != number:
            self._send(RolloutMessage(RolloutStep.DESIRED, name, number))
            self._wanted[name] = number

    def share(self, name: str, number: int | None, share: float, shadow: float) -> None:
        move = RolloutMessage(RolloutStep.SHARE, name, number or 0, share=share, shadow=shadow)
        if self._shares.get(name) != move:
            self._send(move)
            self._shares[name] = move

    async def move(self, name: str, version: ModelVersion) -> None:
        self._send(
            RolloutMessage(RolloutStep.AVAILABLE, name, version.manifest.version, str(version.path))
        )

    def reject(self, name: str, number: int, reason: str) -> None:
        self._send(refused(name, number, reason))

    def report_unopened(self, name: str, number: int, reason: str) -> None:
        self._send(unopened(name, number, reason))

    def retry(self, name: str) -> None:
        self._send(RolloutMessage(RolloutStep.RETRY, name))

    def add(self, name: str, version: ModelVersion) -> None:
        self._send(
            RolloutMessage(RolloutStep.LOAD, name, version.manifest.version, str(version.path))
        )

    def remove(self, name: str) -> None:
        self._send(RolloutMessage(RolloutStep.REMOVE, name))

    def reload(self) -> None:
        self._channel.send(WorkerMessage.RELOAD.value)

    def _send(self, message: RolloutMessage) -> None:
        self._channel.send(message.to_bytes())


class RolloutAgent:
    """Executes the supervisor's rollout messages in a worker, and watches the store if the
    supervisor requests it."""

    def __init__(
        self,
        settings: ServeSettings,
        version_manager: VersionManager,
        channel: WorkerChannel,
        stop: asyncio.Event,
    ) -> None:
        """
        Args:
            stop: event that ends the watching of the store.
        """
        self._settings = settings
        self._version_manager = version_manager
        self._channel = channel
        self._stop = stop
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempts: dict[str, int] = {}  # the latest attempt, by name
        self._follower: StoreWatcher | None = None

    def on_message(self, message: bytes) -> None:
        """Handles one message about versions."""
        if message == WorkerMessage.WATCH_STORE.value:
            self._follower = StoreWatcher(
                VersionResolver(self._settings),
                self._version_manager,
                SupervisorController(self._channel),
            )
            self._do(self._follower.run(self._stop, self._settings))
        elif message == WorkerMessage.RELOAD.value:
            if self._follower is not None:
                self._follower.poll_now()
        else:
            self._on_rollout_message(RolloutMessage.from_bytes(message))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_rollout_message(self, message: RolloutMessage) -> None:
        if message.step is RolloutStep.DESIRED:
            self._version_manager.set_desired(message.name, message.version)
        elif message.step is RolloutStep.SWITCH:
            self._version_manager.activate(message.name, message.version)
        elif message.step is RolloutStep.REFUSED:
            self._attempts.pop(message.name, None)
            self._version_manager.reject(message.name, message.version, message.reason)
        elif message.step is RolloutStep.UNOPENED:
            self._version_manager.report_unopened(message.name, message.version, message.reason)
        elif message.step is RolloutStep.PREPARE:
            self._attempts[message.name] = message.attempt
            self._do(self._prepare(message))
        elif message.step is RolloutStep.SHARE:
            self._version_manager.share(
                message.name, message.version or None, message.share, message.shadow
            )
        elif message.step is RolloutStep.RETRY:
            self._version_manager.retry(message.name)
        elif message.step is RolloutStep.REMOVE:
            self._attempts.pop(message.name, None)
            self._version_manager.remove(message.name)

    async def _prepare(self, message: RolloutMessage) -> None:
        """Loads a version and reports the result, unless the supervisor has sent a newer
        instruction meanwhile."""
        answer = RolloutMessage(
            RolloutStep.PREPARED, message.name, message.version, attempt=message.attempt
        )
        is_kept = False
        try:
            version = await run_in_daemon_thread("load", lambda: open_folder(message.path))
            if self._attempts.get(message.name) == message.attempt:
                is_kept = await self._version_manager.prepare(message.name, version)
        except Exception as error:  # any error: the supervisor waits for a reply
            reason = str(error) if isinstance(error, StoreError) else repr(error)
            answer = refused(message.name, message.version, reason, message.attempt)
            is_kept = True
        if is_kept and self._attempts.get(message.name) == message.attempt:
            self._channel.send(answer.to_bytes())
