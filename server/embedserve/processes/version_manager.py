"""Loads, activates and retires model versions in one process.

The next version is loaded in a thread while the current one serves: opened, restored, warmed and
compared with its goldens. Then new requests switch to it between two event-loop iterations. The
previous version completes its queued requests, and is released together with its rows. A version
that fails to load is not served.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Thread
from time import perf_counter

from embedserve.batching.batcher import Batcher
from embedserve.batching.lookup_engine import LookupEngine
from embedserve.metrics.model_metrics import columns_of
from embedserve.model_info import ModelInfo, PendingVersion, now_iso
from embedserve.pipeline import RequestPipeline
from embedserve.processes.rollout_messages import is_news
from embedserve.processes.threads import run_in_daemon_thread
from embedserve_store import ModelVersion, StoreError
from embedserve_store.memory.mapped_tables import drop_version_pages

logger = logging.getLogger(__name__)

Restored = tuple[LookupEngine, ModelInfo]
Restore = Callable[[str, ModelVersion, Callable[[], None]], Restored]
"""Returns the warm engine of a version for a name. Runs in a thread; calls back when it warms
up."""


@dataclass(frozen=True)
class _Prepared:
    """A loaded version, and the time at which it was found in the store."""

    version: ModelVersion
    engine: LookupEngine
    info: ModelInfo
    found_s: float


class VersionManager:
    """The versions that a process serves, by their served names.

    Attributes:
        versions, engines: current versions and their engines; replaced when other versions take
            over.
    """

    def __init__(
        self,
        pipeline: RequestPipeline,
        versions: dict[str, ModelVersion],
        engines: Mapping[str, LookupEngine],
        restore: Restore,
        make_batcher: Callable[[LookupEngine, ModelInfo], Batcher],
    ) -> None:
        """
        Args:
            make_batcher: called when a version takes over.
        """
        self.versions = versions
        self._shares: dict[str, tuple[int, float, float]] = {}  # of versions that do not serve yet
        self._models = pipeline.models
        self._metrics = pipeline.metrics
        self.engines = dict(engines)
        self._restore = restore
        self._make_batcher = make_batcher
        self._prepared: dict[str, _Prepared] = {}
        self._unopened: set[str] = set()  # names whose next version is retried at each poll
        self._one_at_a_time = asyncio.Lock()  # one thread at a time builds and traces torchrec

    def number(self, name: str) -> int | None:
        """Returns the number of the version that serves ``name``, or None."""
        version = self.versions.get(name)
        return None if version is None else version.manifest.version

    def pending(self, name: str) -> PendingVersion | None:
        """Returns the next version of ``name``, which is loading or has failed."""
        return self._models.pending.get(name)

    def rejected(self, name: str) -> int | None:
        """Returns the number of the next version if it has failed. A version that is retried at
        each poll does not count."""
        coming = self.pending(name)
        if coming is None or coming.state != "failed" or name in self._unopened:
            return None
        return coming.version

    def set_desired(self, name: str, number: int) -> None:
        """Sets version ``number`` as desired. Another pending version, failed or loaded, is
        dropped."""
        metrics = self._metrics.models.get(name)
        if metrics is None:
            return
        metrics.wanted_version = number
        coming = self._models.pending.get(name)
        if coming is not None and coming.version != number:
            self._forget(name)
        if number != self.number(name) and metrics.found_s is None:
            metrics.found_s = perf_counter()

    def share(self, name: str, number: int | None, share: float, shadow: float) -> None:
        """Sets the share of the requests that name only the model, and the share of the other
        versions' batches that are shadowed. Both are percentages for version ``number`` of
        ``name``.

        They apply when that version serves. Until then the previous version keeps its own shares,
        permanently if the new version cannot be loaded. With None they apply immediately to the
        version that serves.
        """
        if number is None or number == self.number(name):
            self._shares.pop(name, None)
            self._models.share(name, share)
            self._models.shadow(name, shadow)
        else:
            self._shares[name] = number, share, shadow

    async def prepare(self, name: str, version: ModelVersion) -> bool:
        """Loads ``version`` while the current one serves. Returns whether it may take over; False
        if another version became desired meanwhile.

        Raises:
            StoreError: the version cannot be loaded, or its results are wrong.
        """
        number = version.manifest.version
        metrics = self._metrics.models.get(name)
        found_s = None if metrics is None else metrics.found_s
        self._forget(name)
        found_s = found_s or perf_counter()
        if metrics is not None:
            metrics.found_s = found_s
        coming = self._report_pending(name, number, "loading")

        def say_warming() -> None:  # runs in a thread
            coming.state = "warming"

        try:
            self._check_columns(version)
            async with self._one_at_a_time:
                if self._models.pending.get(name) is not coming:
                    return False
                restore = partial(self._restore, name, version, say_warming)
                engine, info = await run_in_daemon_thread("load", restore)
        except (StoreError, OSError, ValueError) as error:
            raise StoreError(str(error)) from None
        except Exception as error:
            logger.exception("%s version %d cannot be loaded", name, number)
            raise StoreError(f"{type(error).__name__}: {error}") from None
        if self._models.pending.get(name) is not coming:
            _release_in_background([engine, version])
            return False
        self._prepared[name] = _Prepared(version, engine, info, found_s)
        return True

    def _check_columns(self, version: ModelVersion) -> None:
        columns, most = columns_of(version.manifest), self._metrics.columns_max
        if columns > most:
            raise StoreError(
                f"{version.path}: has {columns} features or keys, and this server has room "
                f"to count {most} since its start: restart it"
            )

    def activate(self, name: str, number: int) -> bool:
        """Switches to version ``number``; returns False if it is not prepared."""
        prepared = self._prepared.get(name)
        if prepared is None or prepared.info.version != number:
            return False
        metrics = self._metrics.models.get(name)
        if metrics is None:
            self._metrics.add(prepared.info).wanted_version = number
        else:
            metrics.switch(prepared.info, perf_counter() - prepared.found_s)
        gone: list[object] = [self.engines.get(name), self.versions.get(name)]
        number_before = self.number(name)
        before = self._models.activate(name, self._make_batcher(prepared.engine, prepared.info))
        self.engines[name], self.versions[name] = prepared.engine, prepared.version
        del self._prepared[name]
        self._forget(name)
        if name in self._shares:
            self.share(name, *self._shares[name])
        if before is not None and number_before is not None:
            self._retire(before, (name, number_before), gone)
        return True

    def remove(self, name: str) -> bool:
        """Stops serving ``name``. Returns False if it was not served, or if nothing else is
        served."""
        number = self.number(name)
        if number is None or len(self.versions) == 1:
            return False
        self._forget(name)
        self._shares.pop(name, None)
        before = self._models.remove(name)
        self._metrics.remove(name)
        gone: list[object] = [self.engines.pop(name), self.versions.pop(name)]
        self._retire(before, (name, number), gone)
        return True

    def _retire(self, batcher: Batcher, leaving: tuple[str, int], gone: list[object]) -> None:
        self._models.draining.append(leaving)

        def end() -> None:
            self._models.draining.remove(leaving)
            _release_in_background(gone)

        batcher.retire(end)

    def reject(self, name: str, number: int, reason: str) -> None:
        """Marks version ``number`` as failed, for ``reason``; it is not served."""
        metrics = self._metrics.models.get(name)
        found_s = None if metrics is None else metrics.found_s
        self._forget(name)
        if metrics is not None:
            metrics.found_s, metrics.is_refused = found_s, True
        self._report_pending(name, number, "failed", reason)

    def report_unopened(self, name: str, number: int, reason: str) -> bool:
        """Shows version ``number`` as failed, for ``reason``, until a poll opens it. Returns
        whether to log the reason; False if only its numbers have changed."""
        coming = self.pending(name)
        if coming is not None and coming.version == number:
            if coming.state != "failed":
                return False  # an operator is loading it
            if name in self._unopened:
                before, coming.reason = coming.reason, reason
                return is_news(reason, before)
        self.reject(name, number, reason)
        self._unopened.add(name)
        return True

    def retry(self, name: str) -> None:
        """Permits a rejected version to be retried."""
        coming = self.pending(name)
        if coming is not None and coming.state == "failed":
            self._forget(name)

    def _forget(self, name: str) -> None:
        if name in self._prepared:
            prepared = self._prepared.pop(name)
            _release_in_background([prepared.engine, prepared.version])
            del prepared
        metrics = self._metrics.models.get(name)
        if metrics is not None:
            metrics.found_s, metrics.is_refused = None, False
        self._models.pending.pop(name, None)
        self._unopened.discard(name)

    def _report_pending(
        self, name: str, number: int, state: str, reason: str = ""
    ) -> PendingVersion:
        coming = self._models.pending[name] = PendingVersion(number, state, reason, now_iso())
        return coming


def _release_in_background(held: list[object]) -> None:
    """Drops the last references in ``held``, in a background thread, because unmapping is slow."""
    Thread(target=_empty, args=(held,), name="let go", daemon=True).start()


def _empty(held: list[object]) -> None:
    while held:
        one = held.pop()
        if isinstance(one, ModelVersion):
            drop_version_pages(one)
