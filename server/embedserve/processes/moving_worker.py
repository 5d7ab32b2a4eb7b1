"""A worker's part in moving to other versions together with the others (moves.py)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

from embedserve.config import ServeSettings
from embedserve.processes.following import Follower, StoreWatch
from embedserve.processes.loading import open_folder
from embedserve.processes.messages import Move, Step, WorkerMessage, refused
from embedserve.processes.rollout import Rollout
from embedserve.processes.threads import in_thread
from embedserve_store import ModelVersion, StoreError


class _TellingSupervisor:
    """A follower's mover where the supervisor has all workers move together."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._wanted: dict[str, int] = {}

    def want(self, model: str, number: int) -> None:
        if self._wanted.get(model) != number:
            self._tell(Move(Step.WANTED, model, number))
            self._wanted[model] = number

    async def move(self, version: ModelVersion) -> None:
        manifest = version.manifest
        self._tell(Move(Step.FOUND, manifest.model, manifest.version, str(version.path)))

    def refuse(self, model: str, number: int, reason: str) -> None:
        self._tell(refused(model, number, reason))

    def _tell(self, move: Move) -> None:
        self._channel.send(move.to_bytes())


class MovingWorker:
    """Does what the supervisor says of versions, and looks at the store if it is told to."""

    def __init__(
        self, settings: ServeSettings, rollout: Rollout, channel: socket.socket, stop: asyncio.Event
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
        self._attempts: dict[str, int] = {}  # the last one, by model

    def hear(self, message: bytes) -> None:
        """Something that is told only where the store is followed."""
        if message == WorkerMessage.LOOK.value:
            watch = StoreWatch(self._settings, self._rollout.versions)
            follower = Follower(watch, self._rollout, _TellingSupervisor(self._channel))
            self._do(follower.run(self._stop, self._settings.follow_s))
        else:
            self._hear_of(Move.from_bytes(message))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _hear_of(self, move: Move) -> None:
        if move.step is Step.WANTED:
            self._rollout.want(move.model, move.version)
        elif move.step is Step.SWITCH:
            self._rollout.switch(move.model, move.version)
        elif move.step is Step.REFUSED:
            self._attempts.pop(move.model, None)
            self._rollout.refuse(move.model, move.version, move.reason)
        elif move.step is Step.PREPARE:
            self._attempts[move.model] = move.attempt
            self._do(self._prepare(move))

    async def _prepare(self, move: Move) -> None:
        """Answers unless the supervisor has said something else meanwhile."""
        answer = Move(Step.PREPARED, move.model, move.version, attempt=move.attempt)
        is_kept = False
        try:
            version = await in_thread("load", lambda: open_folder(move.path))
            if self._attempts.get(move.model) == move.attempt:
                is_kept = await self._rollout.prepare(version)
        except Exception as error:  # whatever it is, the supervisor waits for an answer
            reason = str(error) if isinstance(error, StoreError) else repr(error)
            answer = refused(move.model, move.version, reason, move.attempt)
            is_kept = True
        if is_kept and self._attempts.get(move.model) == move.attempt:
            self._channel.send(answer.to_bytes())
