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
from datetime import UTC, datetime
from functools import partial
from threading import Thread
from time import perf_counter

from embedserve.batching.batcher import Batcher, LookupEngine
from embedserve.exchange import Exchange
from embedserve.processes.threads import in_thread
from embedserve.types import ComingVersion, ModelInfo
from embedserve_store import ModelVersion, StoreError

logger = logging.getLogger(__name__)

Restored = tuple[LookupEngine, ModelInfo]
Restore = Callable[[ModelVersion, LookupEngine], Restored]
"""Makes the warm engine of a version, given that of the version before; runs in a thread."""


@dataclass(frozen=True)
class _Prepared:
    """What is loaded, and since when it was wanted."""

    version: ModelVersion
    engine: LookupEngine
    info: ModelInfo
    found_s: float


class Rollout:
    """The versions that a process answers with, by model.

    Attributes:
        versions, engines: those that answer; replaced as others take over.
    """

    def __init__(
        self,
        exchange: Exchange,
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
        self._models = exchange.models
        self._metrics = exchange.metrics.models
        self.engines = dict(engines)
        self._restore = restore
        self._make_batcher = make_batcher
        self._prepared: dict[str, _Prepared] = {}
        self._found_s: dict[str, float] = {}
        self._one_at_a_time = asyncio.Lock()  # torchrec is built, and traced, by one thread

    def number(self, model: str) -> int:
        """Of the version that answers."""
        return self.versions[model].manifest.version

    def refused(self, model: str) -> int | None:
        """The version that was to be next, and failed."""
        coming = self._models.coming.get(model)
        return coming.version if coming is not None and coming.state == "failed" else None

    def want(self, model: str, number: int) -> None:
        """The store says that version ``number`` is to answer; what failed or was loaded instead is
        forgotten."""
        self._metrics[model].wanted_version = number
        coming = self._models.coming.get(model)
        if coming is not None and coming.version != number:
            self._forget(model)
        if number != self.number(model):
            self._found_s.setdefault(model, perf_counter())

    async def prepare(self, version: ModelVersion) -> bool:
        """Loads ``version`` beside the one that answers; whether it may take over then: False where
        another was wanted meanwhile.

        Raises:
            StoreError: it cannot be loaded, or answers wrongly.
        """
        model, number = version.manifest.model, version.manifest.version
        found_s = self._found_s.get(model, perf_counter())
        self._forget(model)
        self._found_s[model] = found_s
        coming = self._say_coming(model, number, "loading")
        try:
            self._check_features(version)
            async with self._one_at_a_time:
                if self._models.coming.get(model) is not coming:
                    return False
                restore = partial(self._restore, version, self.engines[model])
                engine, info = await in_thread("load", restore)
        except (StoreError, OSError, ValueError) as error:
            raise StoreError(str(error)) from None
        except Exception as error:
            logger.exception("%s version %d cannot be loaded", model, number)
            raise StoreError(f"{type(error).__name__}: {error}") from None
        if self._models.coming.get(model) is not coming:
            _let_go([engine, version])
            return False
        self._prepared[model] = _Prepared(version, engine, info, found_s)
        return True

    def _check_features(self, version: ModelVersion) -> None:
        manifest = version.manifest
        most = self._metrics[manifest.model].features_max
        if len(manifest.features) > most:
            raise StoreError(
                f"{version.path}: has {len(manifest.features)} features, and this server has room "
                f"to count {most} since its start: restart it"
            )

    def switch(self, model: str, number: int) -> bool:
        """Has version ``number`` answer from now on; False where it is not prepared."""
        prepared = self._prepared.get(model)
        if prepared is None or prepared.info.version != number:
            return False
        self._metrics[model].switch(prepared.info, perf_counter() - prepared.found_s)
        before = self._models.switch(self._make_batcher(prepared.engine, prepared.info))
        gone = [self.engines[model], self.versions[model]]
        self.engines[model], self.versions[model] = prepared.engine, prepared.version
        del self._prepared[model]
        self._forget(model)
        before.retire(partial(_let_go, gone))
        return True

    def refuse(self, model: str, number: int, reason: str) -> None:
        """Version ``number`` stays out, for ``reason``."""
        self._forget(model)
        self._say_coming(model, number, "failed", reason)

    def _forget(self, model: str) -> None:
        if model in self._prepared:
            _let_go([self._prepared.pop(model)])
        self._found_s.pop(model, None)
        self._models.coming.pop(model, None)

    def _say_coming(self, model: str, number: int, state: str, reason: str = "") -> ComingVersion:
        since = datetime.now(UTC).isoformat(timespec="seconds")
        coming = self._models.coming[model] = ComingVersion(number, state, reason, since)
        return coming


def _let_go(held: list[object]) -> None:
    """Empties ``held``, the last to hold what is in it, in a thread: to unmap takes long."""
    Thread(target=held.clear, name="let go", daemon=True).start()
