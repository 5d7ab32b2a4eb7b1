"""Opens the store as far as a server holds its versions: whole, one part, or a router's tables."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from embedserve.config import ServeSettings
from embedserve_store import ModelStore, ModelVersion
from embedserve_store.errors import UnreachableError
from embedserve_store.parts.part import LocalTables, Part, RowSelection


def row_selection(settings: ServeSettings) -> RowSelection:
    """Returns the rows that a server with ``settings`` holds."""
    if settings.part:
        return Part.parse(settings.part)
    return LocalTables(settings.local_bytes) if settings.shards else None


def open_folder(path: str, selection: RowSelection = None) -> ModelVersion:
    """Returns the version in the folder ``path``.

    Raises:
        UnreachableError: it cannot be read now.
        StoreError: it is damaged or was removed.
    """
    folder = Path(path)
    store = ModelStore(folder.parent.parent, selection=selection)
    try:
        return store.load(folder.parent.name, int(folder.name))
    except OSError as error:
        raise UnreachableError(f"{path}: {error}") from error


class VersionsToHold(NamedTuple):
    """Versions of one model that a shard is to hold: all of them, and those that aliases name."""

    numbers: frozenset[int]
    aliased: frozenset[int]


def versions_to_hold(
    store: ModelStore, model: str, versions_held: int, unfit: Collection[int] = ()
) -> VersionsToHold:
    """Returns the newest ``versions_held`` versions of ``model`` and those that aliases name,
    without those of ``unfit``, which do not have the shard's part.

    Raises:
        StoreError: the store or the model cannot be read.
    """
    numbers = [number for number in store.versions(model) if number not in unfit]
    named = (one.version for one in store.aliases(model).values())
    aliased = frozenset(numbers).intersection(named)
    return VersionsToHold(aliased | frozenset(numbers[-versions_held:]), aliased)
