"""Opens the store that a command names, a folder or a URL, with progress bars for downloads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from embedserve_store import ModelStore, ModelVersion
from embedserve_store.parts.part import RowSelection
from embedserve_store.terminal.console import transfer_progress


def load_version(
    store: str, cache: Path | None, model: str, version: str | None, selection: RowSelection = None
) -> ModelVersion:
    """Returns one version of a model. From a remote store it is first pulled into ``cache``.

    Args:
        selection: part of the version that is loaded, by default all.

    Raises:
        StoreError: there is no such version, it does not have the part, it is damaged, or the store
            cannot be read.
    """
    with opened(store, cache, selection) as models:
        return models.load(model, version)


@contextlib.contextmanager
def opened(
    store: str, cache: str | Path | None, selection: RowSelection = None
) -> Iterator[ModelStore]:
    """Yields the store. Within the block, loading shows the progress of downloads. ``selection``
    is the part of versions that is loaded, by default all."""
    with transfer_progress() as progress:
        yield ModelStore(store, cache, progress, selection)
