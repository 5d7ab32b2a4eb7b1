"""A worker's part in moving to other versions together with the others (moves.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from embedserve.config import ServeSettings
from embedserve.processes.following import Follower, StoreWatch
from embedserve.processes.loading import open_folder
from embedserve.processes.messages import (
    Move,
    Step,
    WorkerChannel,
    WorkerMessage,
    refused,
    unopened,
)
from embedserve.processes.rollout import Rollout
from embedserve.processes.threads import in_thread
from embedserve_store import ModelVersion, StoreError


class TellingSupervisor:
    """A follower's mover where the supervisor has all workers move together."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self._wanted: dict[str, int] = {}
        self._shares: dict[str, Move] = {}

    def want(self, name: str, number: int) -> None:
        if self._wanted.get(name) != number:
            self._tell(Move(Step.WANTED, name, number))
            self._wanted[name] = number

    def share(self, name: str, number: int | None, share: float, shadow: float) -> None:
        move = Move(Step.SHARE, name, number or 0, share=share, shadow=shadow)
        if self._shares.get(name) != move:
            self._tell(move)
            self._shares[name] = move

    async def move(self, name: str, version: ModelVersion) -> None:
        self._tell(Move(Step.FOUND, name, version.manifest.version, str(version.path)))

    def refuse(self, name: str, number: int, reason: str) -> None:
        self._tell(refused(name, number, reason))

    def report_unopened(self, name: str, number: int, reason: str) -> None:
        self._tell(unopened(name, number, reason))

    def retry(self, name: str) -> None:
        self._tell(Move(Step.RETRY, name))

    def add(self, name: str, version: ModelVersion) -> None:
        self._tell(Move(Step.LOAD, name, version.manifest.version, str(version.path)))

    def remove(self, name: str) -> None:
        self._tell(Move(Step.REMOVE, name))

    def reload(self) -> None:
        self._channel.send(WorkerMessage.RELOAD.value)

    def _tell(self, move: Move) -> None:
        self._channel.send(move.to_bytes())


class MovingWorker:
    """Does what the supervisor says of versions, and looks at the store if it is told to."""

    def __init__(
        self, settings: ServeSettings, rollout: Rollout, channel: WorkerChannel, stop: asyncio.Event
    ) -> None:
        """
        Args:
            stop: once it is set, the store is looked at no more.
        """
        self._settings = settings
        self._rollout = rollout
        self._channel = channel
        self._stop = stop
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempts: dict[str, int] = {}  # the last one, by name
        self._follower: Follower | None = None

    def hear(self, message: bytes) -> None:
        """Something of versions."""
        if message == WorkerMessage.LOOK.value:
            self._follower = Follower(
                StoreWatch(self._settings), self._rollout, TellingSupervisor(self._channel)
            )
            self._do(self._follower.run(self._stop, self._settings))
        elif message == WorkerMessage.RELOAD.value:
            if self._follower is not None:
                self._follower.look_now()
        else:
            self._hear_of(Move.from_bytes(message))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _hear_of(self, move: Move) -> None:
        if move.step is Step.WANTED:
            self._rollout.want(move.name, move.version)
        elif move.step is Step.SWITCH:
            self._rollout.switch(move.name, move.version)
        elif move.step is Step.REFUSED:
            self._attempts.pop(move.name, None)
            self._rollout.refuse(move.name, move.version, move.reason)
        elif move.step is Step.UNOPENED:
            self._rollout.report_unopened(move.name, move.version, move.reason)
        elif move.step is Step.PREPARE:
            self._attempts[move.name] = move.attempt
            self._do(self._prepare(move))
        elif move.step is Step.SHARE:
            self._rollout.share(move.name, move.version or None, move.share, move.shadow)
        elif move.step is Step.RETRY:
            self._rollout.retry(move.name)
        elif move.step is Step.REMOVE:
            self._attempts.pop(move.name, None)
            self._rollout.remove(move.name)

    async def _prepare(self, move: Move) -> None:
        """Answers unless the supervisor has said something else meanwhile."""
        answer = Move(Step.PREPARED, move.name, move.version, attempt=move.attempt)
        is_kept = False
        try:
            version = await in_thread("load", lambda: open_folder(move.path))
            if self._attempts.get(move.name) == move.attempt:
                is_kept = await self._rollout.prepare(move.name, version)
        except Exception as error:  # whatever it is, the supervisor waits for an answer
            reason = str(error) if isinstance(error, StoreError) else repr(error)
            answer = refused(move.name, move.version, reason, move.attempt)
            is_kept = True
        if is_kept and self._attempts.get(move.name) == move.attempt:
            self._channel.send(answer.to_bytes())
