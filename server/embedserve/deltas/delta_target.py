"""Names a version that a server follows to its processes, and makes or opens what they share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import orjson

from embedserve.config import ServeSettings
from embedserve.deltas.changed_rows_memory import changed_rows_bytes_max
from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.status import SharedDeltaState
from embedserve.deltas.version_memory import VersionMemory
from embedserve_store.errors import StoreError
from embedserve_store.model_version import ModelVersion

logger = logging.getLogger(__name__)

BYTES_PER_ROW = 4
"""Bytes that each row of the tables takes in the memory of a version, changed or not."""


@dataclass(frozen=True)
class DeltaTarget:
    """A version whose line the applier follows.

    Attributes:
        name: served name.
        path: folder of the version.
        memory: path of its memory (VersionMemory.path).
        generation: number of its rollout; 0 for a version that the server has started with.
        at_seq: last delta that it may have; None: any.
        is_next: whether it is prepared beside the served version of the name.
        is_switching: whether all workers have prepared it, so that it serves as soon as it has the
            deltas that it needs.
    """

    name: str
    path: str
    memory: str
    generation: int
    at_seq: int | None = None
    is_next: bool = False
    is_switching: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """Returns the key of the version among all that the server follows."""
        return self.name, self.generation


def to_bytes(targets: Sequence[DeltaTarget]) -> bytes:
    return orjson.dumps(targets)


def from_bytes(message: bytes) -> list[DeltaTarget]:
    return msgspec.json.decode(message, type=list[DeltaTarget])


def make_shared_state(
    settings: ServeSettings, version: ModelVersion, generation: int = 0
) -> SharedDeltaState:
    """Returns ``version`` with new memory for its changed rows.

    Raises:
        StoreError: there is no memory for the changed rows, or the rows of the stored plan cannot
            change and settings.strict_plan is set.
    """
    made = _shared_state(settings, version, partial(VersionMemory.create, generation))
    if divided := _divided(version, made.live.version):
        why = (
            f"{version.path}: the plan divides {divided} by columns, into unequal ranges of rows, "
            "or unlike tables with shared features, so that rows cannot change"
        )
        if settings.strict_plan:
            raise StoreError(f"{why}: refused, as strict_plan asks")
        logger.warning("%s: they are served whole", why)
    return made


def open_shared_state(
    settings: ServeSettings, version: ModelVersion, memory: str, generation: int
) -> SharedDeltaState:
    """Returns ``version`` with the memory that the supervisor has made.

    Raises:
        StoreError: the memory cannot be opened, or is no more that of this rollout.
    """
    return _shared_state(settings, version, partial(VersionMemory.open, memory, generation))


def check_room(settings: ServeSettings, version: ModelVersion, available: int) -> None:
    """Raises StoreError if the changed rows of another version may not fit into ``available``
    bytes."""
    rows = sum(table.num_embeddings for table in version.manifest.tables)
    needed = changed_rows_bytes_max(settings, version) + BYTES_PER_ROW * rows
    if needed > available:
        raise StoreError(
            f"{version.path}: its changed rows may take {needed} bytes beside those of the served "
            f"version, and {available} bytes of memory are available"
        )


def _shared_state(
    settings: ServeSettings, version: ModelVersion, get_memory: Callable[[], VersionMemory]
) -> SharedDeltaState:
    """Returns ``version`` in the memory that ``get_memory`` returns, new or as another process has
    left it. Raises StoreError, also if the address space is too small."""
    try:
        live = LiveRows(
            version,
            changed_rows_bytes_max(settings, version),
            settings.workers,
            settings.delta_undo,
            get_memory(),
            settings.delta_new_ids_percent,
        )
        return SharedDeltaState(
            live, has_broker=bool(settings.delta_notify), are_signed=bool(settings.delta_key)
        )
    except OSError as error:
        raise StoreError(f"{version.path}: no memory for changed rows: {error}") from error


def _divided(stored: ModelVersion, served: ModelVersion) -> str:
    """Returns the names of tables that the stored plan divides and that of the served version
    does not."""
    plans = served.plan.tables
    tables = stored.plan.tables.items()
    return ", ".join(repr(name) for name, plan in tables if plans[name].shards != plan.shards)
