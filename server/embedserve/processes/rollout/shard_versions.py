"""Decides which versions a shard holds, and loads and unloads them.

Routers change versions after their shards: a router serves a version once each part has a replica
of it. So a shard holds the newest versions side by side, and those that aliases name, each under
its number. A version that requests still name stays, and newer ones wait for its memory. So does
the last version of a model, until another one is loaded. Names without a number, which only
administrators load, stay until they are unloaded.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from time import monotonic

from embedserve.config import ServeSettings
from embedserve.daemon_threads import run_in_daemon_thread
from embedserve.errors import ConflictError
from embedserve.metrics.model_metrics import ModelMetrics
from embedserve.model_names import split_name
from embedserve.processes.open_store import VersionsToHold
from embedserve.processes.rollout.admin_service import AdminService
from embedserve.processes.rollout.version_resolver import VersionResolver
from embedserve_store.errors import NoSuchPartError

logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""Seconds without a request after which a version that is not to be held may be dropped."""
RETRY_S = 60.0
"""Seconds after which a version that could not be loaded is tried again."""


def next_step(
    to_hold: VersionsToHold, loaded: Collection[int], idle: Collection[int], loaded_max: int
) -> tuple[str, int] | None:
    """Returns the next change of the versions that a shard holds: ("load" or "unload", number).

    Args:
        loaded: versions that it has, also those that it is not to hold.
        idle: those of ``loaded`` that no request has named for a while.
        loaded_max: number of versions up to which it loads more. Those to hold may all be loaded.

    Returns:
        None if nothing is to change, or if all memory is in use.
    """
    if len(loaded) > 1:
        for number in sorted(loaded):
            if number in idle and number not in to_hold.numbers:
                return "unload", number
    missing = sorted(to_hold.numbers.difference(loaded))
    if not missing:
        return None
    if len(loaded) < max(loaded_max, len(to_hold.numbers)):
        return "load", missing[-1]
    # A version that serves nobody, such as one that failed in the routers, makes room for a newer.
    for number in sorted(loaded):
        if number in idle and number not in to_hold.aliased and number < missing[-1]:
            return "unload", number
    return None


class ShardVersions:
    """The versions of a shard, in the process that watches the store."""

    def __init__(
        self,
        settings: ServeSettings,
        resolver: VersionResolver,
        admin: AdminService,
        metrics: Mapping[str, ModelMetrics],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """
        Args:
            metrics: metrics by served name, which count requests in all workers.
            clock: returns seconds.
        """
        self._settings = settings
        self._resolver = resolver
        self._admin = admin
        self._metrics = metrics
        self._clock = clock
        self._counts: dict[str, tuple[float, float]] = {}  # requests, and since when
        self._retry_at_s: dict[str, float] = {}
        self._unfit: defaultdict[str, set[int]] = defaultdict(set)  # without this part, by model
        self._waits_for: dict[str, int] = {}

    async def update(self) -> None:
        """Loads and unloads versions until the shard holds what it is to hold, as far as memory is
        free."""
        for name in self._counts.keys() - self._metrics.keys():
            del self._counts[name]  # a version that is loaded again has a minute again
        for model in self._models():
            to_hold = await run_in_daemon_thread(
                "follow",
                partial(self._resolver.versions_to_hold, model, frozenset(self._unfit[model])),
            )
            while to_hold is not None and await self._advance(model, to_hold):
                pass

    def _models(self) -> list[str]:
        """Returns the models whose versions are not fixed by --model."""
        fixed = {split_name(name)[0] for name in self._settings.model if "@" in name}
        served = dict.fromkeys(split_name(name)[0] for name in self._metrics)
        return [model for model in served if model not in fixed]

    async def _advance(self, model: str, to_hold: VersionsToHold) -> bool:
        """Takes the next step for ``model``; returns whether another one may follow."""
        loaded = {
            int(version): name
            for name in self._metrics
            for one, version in [split_name(name)]
            if one == model and version.isdecimal()  # others were loaded by an administrator
        }
        now_s = self._clock()
        idle = {number for number, name in loaded.items() if self._is_idle(name, now_s)}
        may_load = frozenset(
            number
            for number in to_hold.numbers.difference(self._unfit[model])
            if number in loaded or now_s >= self._retry_at_s.get(f"{model}@{number}", 0.0)
        )
        step = next_step(
            VersionsToHold(may_load, to_hold.aliased), loaded, idle, self._settings.versions_held
        )
        if step is None:
            self._log_waiting(model, may_load.difference(loaded))
            return False
        self._waits_for.pop(model, None)
        operation, number = step
        name = f"{model}@{number}"
        try:
            if operation == "unload":
                await self._admin.unload(name)
            else:
                await self._admin.load(name)
        except ConflictError as error:
            if isinstance(error.__cause__, NoSuchPartError):
                logger.warning("%s is not held: %s", name, error.message)
                self._unfit[model].add(number)  # for good: a version never changes
                return True
            logger.error("%s: %s fails: %s", name, operation, error.message)
            self._retry_at_s[name] = self._clock() + RETRY_S
            return operation == "load"
        return True

    def _is_idle(self, name: str, now_s: float) -> bool:
        requests = self._metrics[name].version.requests
        requests.flush()  # otherwise answers count only once they are many
        count = sum(requests.total().values())
        before, since_s = self._counts.get(name, (-1.0, now_s))
        if count != before:
            self._counts[name] = count, now_s
            return False
        return now_s - since_s >= IDLE_S

    def _log_waiting(self, model: str, missing: Collection[int]) -> None:
        """Logs once that a version waits until the shard may drop another one."""
        if missing and self._waits_for.get(model) != max(missing):
            self._waits_for[model] = max(missing)
            logger.warning(
                "%s version %d waits: requests name all versions that this shard holds, and it "
                "has room for %d (--versions-held)",
                model,
                max(missing),
                self._settings.versions_held,
            )
