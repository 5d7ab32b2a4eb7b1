"""The process that places the shards of `embedserve cluster --backend ray` in a Ray cluster.

It creates a placement group for each part, which has each replica on another Ray node, and an actor
in it for each replica. It writes their addresses to the file that the router reads. Groups and
actors end with this process, even if it is killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedserve.processes import service_manager
from embedserve.processes.forked import describe_exit
from embedserve.processes.ray_backend.connection import connected, has_control_plane
from embedserve.processes.ray_backend.shard_actor import RayShardActor
from embedserve.processes.ray_backend.shard_watch import ShardName, ShardWatch
from embedserve_store.terminal.console import say
from embedserve_store.terminal.sizes import human_bytes

PLACE_S_MAX = 60.0
"""Seconds for Ray to find nodes with free resources for all shards."""
STOP_S_MAX = 12.0
"""Seconds for shards to drain, which takes at most 10 s; then Ray ends them. Less than
local_cluster.STOP_S_MAX, after which this process is killed."""
REPLACE_S = 5.0
"""Seconds between two attempts to create actors that Ray has given up."""
SHARD_CPUS = 1
"""CPUs that a shard reserves in Ray."""


@dataclass(frozen=True)
class PlacementSettings:
    """Where which shards run.

    Attributes:
        name: name of all shards.
        ray_address: HOST:PORT of Ray's head node, or ``auto``.
        path: file of addresses.
        commands: for each part the arguments of Python that run a shard of it.
        replicas: shards for each part.
        memory_bytes: bytes that a shard reserves in Ray; 0: none.
    """

    name: str
    ray_address: str
    path: str
    commands: Sequence[Sequence[str]]
    replicas: int
    memory_bytes: int = 0

    def resources(self) -> dict[str, float]:
        """Returns what a shard reserves, by Ray's names."""
        reserved: dict[str, float] = {"CPU": SHARD_CPUS}
        return reserved | ({"memory": self.memory_bytes} if self.memory_bytes else {})


def check_nodes(
    nodes: Sequence[Mapping[str, Any]], replicas: int, resources: Mapping[str, float]
) -> None:
    """Checks that the replicas of a part can be on different nodes.

    Args:
        nodes: nodes as ``ray.nodes()`` returns them.
        replicas: replicas of each part.
        resources: what a shard reserves.

    Raises:
        ValueError: too few nodes are that large; the message has the numbers.
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    large = [
        one for one in alive if all(one.get(name, 0) >= count for name, count in resources.items())
    ]
    if len(large) < replicas:
        raise ValueError(
            f"replicas is {replicas}, and each replica of a part needs a Ray node of its own with "
            f"{_shown(resources)}: {len(alive)} nodes are alive, and {len(large)} are that large"
        )


def place(settings: PlacementSettings) -> None:
    """Places the shards, and watches them until SIGTERM or SIGINT. Reports to NOTIFY_SOCKET once
    all are ready.

    Raises:
        OSError: there is no such Ray cluster, or a shard ended before all were ready.
        ValueError: the cluster has no place for the shards, or has shards of the same name.
    """
    with connected(settings.ray_address, shows_logs=True):
        placement = Placement(settings)
        signal.signal(signal.SIGTERM, placement.on_stop)  # ray.init has set another handler
        signal.signal(signal.SIGINT, placement.on_stop)
        signal.signal(signal.SIGHUP, placement.on_reload)
        try:
            placement.run()
        finally:
            placement.release()


class Placement:
    """Placement groups and actors of the shards."""

    def __init__(self, settings: PlacementSettings) -> None:
        self._settings = settings
        self._groups: list[Any] = []
        self._actors: dict[ShardName, Any] = {}
        self._watch = ShardWatch(Path(settings.path))
        self._replace_at_s = 0.0
        self._is_stopping = self._is_reload_requested = False

    def on_stop(self, *_: object) -> None:
        self._is_stopping = True

    def on_reload(self, *_: object) -> None:
        self._is_reload_requested = True

    def run(self) -> None:
        """Places the shards, watches and stops them."""
        self._check_name()
        if not self._reserve():
            return
        self._start()
        is_ready = False
        while not self._is_stopping:
            self._watch.poll()
            if is_ready:
                self._replace_lost()
            else:
                is_ready = self._check_ready()
            if self._is_reload_requested:
                self._is_reload_requested = False
                for actor in self._actors.values():
                    actor.poll_store.remote()
        self._stop()

    def release(self) -> None:
        """Ends all actors, and gives back what they reserved. Without its control plane Ray would
        wait for it for a minute, and then end this process; the actors end with it."""
        import ray

        if not has_control_plane():
            return
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        for group in self._groups:
            ray.util.remove_placement_group(group)

    def _check_name(self) -> None:
        """Raises ValueError if Ray has shards of the name, also of another number of parts."""
        import ray

        name = self._settings.name
        if any(one.startswith(f"{name}/") for one in ray.util.list_named_actors()):
            raise ValueError(f"Ray has shards of the name {name!r} already")

    def _reserve(self) -> bool:
        """Reserves nodes for all replicas. Returns False if it was stopped before."""
        import ray

        resources, replicas = self._settings.resources(), self._settings.replicas
        check_nodes(ray.nodes(), replicas, resources)
        for _ in self._settings.commands:
            bundles = [dict(resources) for _ in range(replicas)]
            self._groups.append(ray.util.placement_group(bundles, strategy="STRICT_SPREAD"))
        end_s = time.monotonic() + PLACE_S_MAX
        for part, group in enumerate(self._groups):
            while not group.wait(timeout_seconds=1):
                if self._is_stopping:
                    return False
                if time.monotonic() > end_s:
                    raise ValueError(
                        f"part {part} has no place for {replicas} replicas on {replicas} Ray nodes "
                        f"with {_shown(resources)} each: nothing became free in {PLACE_S_MAX:g} s"
                    )
        return True

    def _start(self) -> None:
        """Starts all shards."""
        settings = self._settings
        for part in range(len(settings.commands)):
            for replica in range(settings.replicas):
                shard = ShardName(settings.name, part, len(settings.commands), replica)
                self._actors[shard] = self._create(shard)
        self._watch.adopt(self._actors)

    def _create(self, shard: ShardName) -> Any:
        """Returns a new actor for ``shard``. Raises ValueError if its name is in use."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = ray.remote(RayShardActor).options(
            name=str(shard),
            num_cpus=SHARD_CPUS,
            memory=self._settings.memory_bytes or None,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._groups[shard.part], shard.replica
            ),
        )
        return options.remote(shard.label, self._settings.commands[shard.part])

    def _replace_lost(self) -> None:
        """Creates actors that Ray does not start again: an operator ended them, or they could not
        be constructed on another node."""
        if not self._watch.lost or time.monotonic() < self._replace_at_s:
            return
        self._replace_at_s = time.monotonic() + REPLACE_S
        for shard, reason in self._watch.lost.items():
            say(f"{shard.label}: its actor ended, and is created again: {reason}")
            with suppress(ValueError):  # Ray has not forgotten the name yet
                self._actors[shard] = self._create(shard)
        self._watch.adopt(self._actors)

    def _check_ready(self) -> bool:
        """Returns whether all shards are ready, and reports it.

        Raises:
            OSError: one has ended instead.
        """
        for shard, state in self._watch.states.items():
            if state.exit_code is not None:
                how = describe_exit(state.exit_code)
                raise OSError(f"{shard.label} {how} before it was ready")
        if self._watch.lost:
            [(shard, reason), *_] = self._watch.lost.items()
            raise OSError(f"{shard.label}: its actor ended before it was ready: {reason}")
        states = self._watch.states
        if len(states) < len(self._actors) or not all(one.is_ready for one in states.values()):
            return False
        service_manager.notify(os.environ["NOTIFY_SOCKET"], "READY=1")
        return True

    def _stop(self) -> None:
        """Stops the shards, and waits for them."""
        for actor in self._actors.values():
            actor.stop.remote()
        end_s = time.monotonic() + STOP_S_MAX
        while time.monotonic() < end_s and not self._has_ended():
            self._watch.poll()

    def _has_ended(self) -> bool:
        states = self._watch.states
        return all(
            shard in self._watch.lost or (shard in states and states[shard].exit_code is not None)
            for shard in self._actors
        )


def _shown(resources: Mapping[str, float]) -> str:
    reserved = dict(resources)
    memory = reserved.pop("memory", 0)
    shown = [f"{count:g} {name}" for name, count in reserved.items()]
    return " and ".join([*shown, *([f"{human_bytes(memory)} of memory"] if memory else [])])
