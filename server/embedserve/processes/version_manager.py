"""How one process comes to answer with another version of a model.

The next version is loaded beside the one that answers, in a thread: opened, restored, warmed and
compared with its goldens. Then it takes what comes from one turn of the event loop to the next; the
one before answers what it holds and is let go, its rows with it. A version that fails stays out.
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
from embedserve.model_names import split_name
from embedserve.pipeline import RequestPipeline
from embedserve.processes.rollout_messages import is_news
from embedserve.processes.threads import run_in_daemon_thread
from embedserve_store import ModelVersion, StoreError
from embedserve_store.memory.mapped_tables import let_go

logger = logging.getLogger(__name__)

Restored = tuple[LookupEngine, ModelInfo]
Restore = Callable[[str, ModelVersion, Callable[[], None]], Restored]
"""Returns the warm engine of a version for a name, in a thread; calls back when it warms up."""


@dataclass(frozen=True)
class _Prepared:
    """What is loaded, and since when it was wanted."""

    version: ModelVersion
    engine: LookupEngine
    info: ModelInfo
    found_s: float


class VersionManager:
    """The versions that a process answers with, by the name that they are served by.

    Attributes:
        versions, engines: those that answer; replaced as others take over.
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
            make_batcher: called as a version takes over.
        """
        self.versions = versions
        self._shares: dict[str, tuple[int, float, float]] = {}  # of versions that are to answer
        self._models = pipeline.models
        self._metrics = pipeline.metrics
        self.engines = dict(engines)
        self._restore = restore
        self._make_batcher = make_batcher
        self._prepared: dict[str, _Prepared] = {}
        self._unopened: set[str] = set()  # names whose next version each look tries again
        self._one_at_a_time = asyncio.Lock()  # torchrec is built, and traced, by one thread

    def number(self, name: str) -> int | None:
        """Of the version that answers; None where none does."""
        version = self.versions.get(name)
        return None if version is None else version.manifest.version

    def pending(self, name: str) -> PendingVersion | None:
        """The version that is to be next, or failed."""
        return self._models.coming.get(name)

    def rejected(self, name: str) -> int | None:
        """The version that was to be next, and failed; not one that each look tries again."""
        coming = self.pending(name)
        if coming is None or coming.state != "failed" or name in self._unopened:
            return None
        return coming.version

    def set_desired(self, name: str, number: int) -> None:
        """The store says that version ``number`` is to answer; what failed or was loaded instead is
        forgotten."""
        metrics = self._metrics.models.get(name)
        if metrics is None:
            return
        metrics.wanted_version = number
        coming = self._models.coming.get(name)
        if coming is not None and coming.version != number:
            self._forget(name)
        if number != self.number(name) and metrics.found_s is None:
            metrics.found_s = perf_counter()

    def share(self, name: str, number: int | None, share: float, shadow: float) -> None:
        """Gives version ``number`` of ``name`` its share of the requests that name the model alone,
        and of the others' batches that it is compared in; both in percent.

        They begin when that version answers: the one before it keeps its own until then, also for
        good where the new one cannot be loaded. None: whichever answers has them, at once.
        """
        if number is None or number == self.number(name):
            self._shares.pop(name, None)
            self._models.share(name, share)
            self._models.shadow(name, shadow)
        else:
            self._shares[name] = number, share, shadow

    async def prepare(self, name: str, version: ModelVersion) -> bool:
        """Loads ``version`` beside the one that answers; whether it may take over then: False where
        another was wanted meanwhile.

        Raises:
            StoreError: it cannot be loaded, or answers wrongly.
        """
        number = version.manifest.version
        metrics = self._metrics.models.get(name)
        found_s = None if metrics is None else metrics.found_s
        self._forget(name)
        found_s = found_s or perf_counter()
        if metrics is not None:
            metrics.found_s = found_s
        coming = self._report_pending(name, number, "loading")

        def say_warming() -> None:  # in a thread
            coming.state = "warming"

        try:
            self._check_columns(version)
            async with self._one_at_a_time:
                if self._models.coming.get(name) is not coming:
                    return False
                restore = partial(self._restore, name, version, say_warming)
                engine, info = await run_in_daemon_thread("load", restore)
        except (StoreError, OSError, ValueError) as error:
            raise StoreError(str(error)) from None
        except Exception as error:
            logger.exception("%s version %d cannot be loaded", name, number)
            raise StoreError(f"{type(error).__name__}: {error}") from None
        if self._models.coming.get(name) is not coming:
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
        """Has version ``number`` answer from now on; False where it is not prepared."""
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
        """Has nothing answer for ``name`` any more; False where nothing did, or nothing else is
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
        self._models.leaving.append(leaving)

        def end() -> None:
            self._models.leaving.remove(leaving)
            _release_in_background(gone)

        batcher.retire(end)

    def reject(self, name: str, number: int, reason: str) -> None:
        """Version ``number`` stays out, for ``reason``."""
        metrics = self._metrics.models.get(name)
        found_s = None if metrics is None else metrics.found_s
        self._forget(name)
        if metrics is not None:
            metrics.found_s, metrics.is_refused = found_s, True
        self._report_pending(name, number, "failed", reason)

    def report_unopened(self, name: str, number: int, reason: str) -> bool:
        """Shows version ``number`` as failed, for ``reason``, until a look opens it. Returns
        whether the log is to tell of it: not again where only numbers of the reason changed."""
        coming = self.pending(name)
        if coming is not None and coming.version == number:
            if coming.state != "failed":
                return False  # an operator has it loaded
            if name in self._unopened:
                before, coming.reason = coming.reason, reason
                return is_news(reason, before)
        self.reject(name, number, reason)
        self._unopened.add(name)
        return True

    def retry(self, name: str) -> None:
        """What was refused may be tried again."""
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
        self._models.coming.pop(name, None)
        self._unopened.discard(name)

    def _report_pending(
        self, name: str, number: int, state: str, reason: str = ""
    ) -> PendingVersion:
        coming = self._models.coming[name] = PendingVersion(number, state, reason, now_iso())
        return coming


def _is_of(name: str, model: str) -> bool:
    return split_name(name)[0] == model


def _release_in_background(held: list[object]) -> None:
    """Empties ``held``, the last to hold what is in it, in a thread: to unmap takes long."""
    Thread(target=_empty, args=(held,), name="let go", daemon=True).start()


def _empty(held: list[object]) -> None:
    while held:
        one = held.pop()
        if isinstance(one, ModelVersion):
            let_go(one)
