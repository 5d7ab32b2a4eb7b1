"""Loop of the applier: looks for deltas of all followed models, in a process of its own.

It may be killed at any instruction. Its successor continues after the last committed delta.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from embedserve.config import ServeSettings
from embedserve.config_checks import delta_poll_s
from embedserve.deltas.follower import DeltaFollower
from embedserve.deltas.memory import memory_bytes
from embedserve.deltas.status import FollowedModel
from embedserve_store.deltas.delta_line import DeltaLine
from embedserve_store.model_store import ModelStore
from embedserve_store.model_version import ModelVersion

RETRY_S_MAX = 5.0
"""Seconds between two looks, at most, while no delta can be applied."""


def run_applier(
    settings: ServeSettings,
    versions: Mapping[str, ModelVersion],
    deltas: Mapping[str, FollowedModel],
    supervisor: socket.socket,
) -> None:
    """Applies deltas until SIGTERM, or until the supervisor is gone.

    Sends a byte to ``supervisor`` once every model has looked for the first time.

    Args:
        versions, deltas: versions and their memory, by served name.
    """
    threading.Thread(target=_end_with, args=(supervisor,), daemon=True).start()
    models = ModelStore(settings.store, Path(settings.cache) if settings.cache else None)
    followers = []
    for name, followed in deltas.items():
        version = versions[name]
        line = DeltaLine(models, version.manifest)
        room = memory_bytes(settings, version)
        followers.append(DeltaFollower(name, line, followed, room))
    is_told, wait_s = False, delta_poll_s(settings)
    while True:
        looks = [follower.look() for follower in followers]
        states = [followed.status.read() for followed in deltas.values()]
        if not is_told and all(state.is_looked for state in states):
            is_told = True
            supervisor.send(b"\n")
        if not any(looks):
            has_failed = all(state.reason for state in states)
            least_s = delta_poll_s(settings)
            wait_s = min(2 * wait_s, max(RETRY_S_MAX, least_s)) if has_failed else least_s
            time.sleep(wait_s)


def _end_with(supervisor: socket.socket) -> None:
    """Ends this process when the supervisor's end of the channel is closed."""
    supervisor.recv(1)
    os._exit(0)
