"""The addresses of ``--shards ray:NAME``, for routers that `embedserve cluster` has not started.

A process beside the router connects to Ray, finds the shards by their names, and writes their
addresses to a file, which the router reads as that of ``file:PATH``. Ray may end that process, so a
second one, its parent, starts it again. The router and the addresses that it knows remain
meanwhile.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from embedserve.config import ServeSettings
from embedserve.processes import service_manager
from embedserve.processes.cluster_child import Child
from embedserve.processes.forked import end_with_parent
from embedserve.processes.local_cluster import ChildFailedError, LocalCluster
from embedserve.processes.ray_backend.connection import (
    AUTO,
    NAMESPACE,
    PYTHON,
    check_address,
    check_installed,
    check_shards_name,
    connected,
)
from embedserve.processes.ray_backend.shard_watch import ShardName, ShardWatch
from embedserve.shard_client.discovery import RayShards, parse_shards

logger = logging.getLogger(__name__)

LIST_POLLS = 4
"""Polls of the shards between two looks for their names."""
POLL_S = 0.05
STOP_S_MAX = 5.0
"""Seconds for the following process to end after SIGTERM, before it is killed."""


@contextmanager
def following_ray(settings: ServeSettings) -> Iterator[ServeSettings]:
    """Yields the settings with a file of addresses in place of ``ray:NAME``, which is kept up to
    date in its block.

    Raises:
        ValueError: ray is not installed, or the setting is malformed.
        OSError: there is no Ray cluster, or it has no shards of that name.
    """
    source = parse_shards(settings.shards)
    assert isinstance(source, RayShards)
    try:
        check_shards_name(source.name)
    except ValueError as error:
        raise ValueError(f"--shards is {settings.shards!r}: {error}") from error
    check_installed()
    check_address(AUTO)
    parent = os.getpid()
    with tempfile.TemporaryDirectory(prefix="embedserve-ray-") as folder:
        path = Path(folder) / "shards.json"
        process = subprocess.Popen(
            [*PYTHON, "follow", source.name, str(path)],
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C reaches the router alone, which drains first
            preexec_fn=lambda: end_with_parent(parent),
        )
        logger.info("waits for the addresses of the shards %r from Ray", source.name)
        try:
            while not path.exists():
                if process.poll() is not None:
                    raise OSError(f"--shards is {settings.shards!r}: no addresses were found")
                time.sleep(POLL_S)
            yield replace(settings, shards=f"file:{path}")
        finally:
            process.terminate()
            try:
                process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def keep_following(name: str, path: str) -> None:
    """Runs ``follow`` in a process that is started again when it ends, until SIGTERM.
    Ends with exit code 1 if the addresses are not found the first time; that process logs why."""
    child = Child("the process that follows Ray", [*PYTHON, "follow-once", name, path])
    with tempfile.TemporaryDirectory(prefix="embedserve-ray-") as folder:
        try:
            LocalCluster([], child, lambda: None).run(Path(folder))
        except ChildFailedError:
            sys.exit(1)


def follow(name: str, path: str) -> None:
    """Keeps the file ``path`` up to date, until this process ends or Ray does. Reports to
    NOTIFY_SOCKET once the file is there.

    Raises:
        ValueError: Ray has no shards of that name.
        OSError: there is no Ray cluster.
    """
    with connected(AUTO, shows_logs=False):
        watch = ShardWatch(Path(path))
        actors = find_actors(name, {})
        if not actors:
            raise ValueError(f"Ray has no shards of the name {name!r}")
        is_ready = False
        while True:
            watch.adopt(actors)
            for _ in range(LIST_POLLS):
                watch.poll()
                if not is_ready and Path(path).exists():
                    is_ready = True
                    service_manager.notify(os.environ["NOTIFY_SOCKET"], "READY=1")
            actors = find_actors(
                name, {shard: one for shard, one in actors.items() if shard not in watch.lost}
            )


def find_actors(name: str, known: Mapping[ShardName, Any]) -> dict[ShardName, Any]:
    """Returns the actors of the shards of ``name`` that Ray has now; those in ``known`` are not
    looked up again."""
    import ray

    found = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        shard = ShardName.parse(entry["name"]) if entry["namespace"] == NAMESPACE else None
        if shard is None or shard.name != name:
            continue
        with suppress(ValueError):  # it has ended meanwhile
            found[shard] = known.get(shard) or ray.get_actor(entry["name"], namespace=NAMESPACE)
    return found
