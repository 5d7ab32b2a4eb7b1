"""A serving process's role in a rollout, with a supervisor or alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from embedserve.config import ServeSettings
from embedserve.processes.rollout.admin_service import AdminService
from embedserve.processes.rollout.messages import Desired, Report
from embedserve.processes.rollout.shard_versions import ShardVersions
from embedserve.processes.rollout.store_watcher import StoreWatcher
from embedserve.processes.rollout.version_manager import VersionManager
from embedserve.processes.rollout.version_resolver import VersionResolver


class RolloutAgent:
    """Reconciles a process with the desired state, and reports to the coordinator.

    Attributes:
        admin: operations of administrators on the whole server.
    """

    def __init__(
        self,
        settings: ServeSettings,
        version_manager: VersionManager,
        send: Callable[[Report], None],
        stop: asyncio.Event,
        resolver: VersionResolver | None = None,
    ) -> None:
        """
        Args:
            send: sends a report to the coordinator.
            stop: event that ends the watching of the store.
        """
        resolver = resolver or VersionResolver(settings, version_manager.why_not_yet)
        self._version_manager = version_manager
        self.admin = AdminService(resolver, version_manager, send)
        shard_versions = None
        if settings.part:
            shard_versions = ShardVersions(settings, resolver, self.admin, version_manager.metrics)
        self._watcher = StoreWatcher(
            settings, resolver, version_manager, send, stop, shard_versions
        )
        version_manager.report = send

    def apply(self, desired: Desired) -> None:
        """Reconciles this process with ``desired``."""
        self._version_manager.apply(desired)
        self._watcher.apply(desired)
