"""The states of shards in Ray, polled from their actors, and the file of their addresses.

The address of a shard that is lost stays in the file until its successor has another one: a router
knows by itself which of its connections work.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedserve.processes.ray_backend.shard_actor import ShardState
from embedserve.shard_client.discovery import write_shards

POLL_S = 0.5
"""Seconds between two polls of a shard's state, a call of about a millisecond."""
ANSWER_S_MAX = 10.0
"""Seconds that the first write to a file that is there already waits for the states of all shards:
the process that wrote it may have known addresses of shards that answer late."""
NUMBER = re.compile(r"[0-9]{1,5}")
"""Numbers in names of actors. Others may have such names, too, and a part costs memory."""


@dataclass(frozen=True)
class ShardName:
    """Name of a shard's actor, unique in Ray.

    Attributes:
        name: name of all shards of a cluster.
        part: number of the part.
        parts: number of parts.
        replica: number of the replica.
    """

    name: str
    part: int
    parts: int
    replica: int

    def __str__(self) -> str:
        return f"{self.name}/{self.part}/{self.parts}/{self.replica}"

    @property
    def label(self) -> str:
        return f"part {self.part} replica {self.replica}"

    @classmethod
    def parse(cls, text: str) -> ShardName | None:
        """Parses the name of an actor; returns None if it is no shard's."""
        name, *numbers = text.split("/")
        if len(numbers) != 3 or not all(map(NUMBER.fullmatch, numbers)):
            return None
        part, parts, replica = map(int, numbers)
        return cls(name, part, parts, replica) if part < parts else None


class ShardWatch:
    """Polls the actors of the shards of one cluster.

    Attributes:
        states: last known state of each shard.
        lost: shards whose actors have ended for good, and why.
    """

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: file of addresses, written when one changes.
        """
        self.states: dict[ShardName, ShardState] = {}
        self.lost: dict[ShardName, str] = {}
        self._actors: dict[ShardName, Any] = {}
        self._path = path
        self._pending: dict[Any, ShardName] = {}  # by Ray's reference of the call
        self._addresses: dict[ShardName, str] = {}
        self._written: list[list[str]] | None = None
        self._wait_until_s: float | None = None

    def adopt(self, actors: Mapping[ShardName, Any]) -> None:
        """Replaces the actors by those of the handles ``actors``."""
        if self._wait_until_s is None:
            self._wait_until_s = time.monotonic() + ANSWER_S_MAX
        self._actors = dict(actors)
        self._pending = {ref: one for ref, one in self._pending.items() if one in actors}
        self.lost.clear()

    def poll(self) -> None:
        """Asks each actor for its state, waits POLL_S, and takes the answers. A call waits for an
        actor that Ray starts again, so there is at most one for each."""
        import ray

        waited_for = {*self._pending.values(), *self.lost}
        for name, actor in self._actors.items():
            if name not in waited_for:
                self._pending[actor.state.remote()] = name
        time.sleep(POLL_S)
        refs = list(self._pending)
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        for ref in done:
            name = self._pending.pop(ref)
            try:
                self.states[name] = state = ray.get(ref)
                if state.address:
                    self._addresses[name] = state.address
            except ray.exceptions.RayError as error:
                self.lost[name] = (str(error).strip().splitlines() or [""])[-1].strip()
        self._write()

    def _write(self) -> None:
        """Writes the addresses if they have changed, once every part has one."""
        counts = {name.parts for name in self._actors}
        if len(counts) != 1:
            return  # two clusters, one of them ending
        if self._written is None and self._path.exists() and self._waits():
            return
        found: list[list[str]] = [[] for _ in range(counts.pop())]
        for name in sorted(self._actors, key=str):
            if address := self._addresses.get(name):
                found[name.part].append(address)
        if found != self._written and all(found):
            write_shards(self._path, found)
            self._written = found

    def _waits(self) -> bool:
        """Returns whether shards have yet to answer for the first time, and may still do so."""
        is_late = self._wait_until_s is not None and time.monotonic() >= self._wait_until_s
        return not is_late and any(
            one not in self.states and one not in self.lost for one in self._actors
        )
