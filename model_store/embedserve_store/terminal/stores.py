"""Opens the store that a command names, a folder or a URL, with progress bars for downloads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from embedserve_store import ModelStore, ModelVersion
from embedserve_store.remote.remote_files import TransferProgress
from embedserve_store.terminal.console import console
from embedserve_store.terminal.sizes import human_bytes


def load_version(store: str, cache: Path | None, model: str, version: str | None) -> ModelVersion:
    """Returns one version of a model. From a remote store it is first pulled into ``cache``.

    Raises:
        StoreError: there is no such version, it is damaged, or the store cannot be read.
    """
    with opened(store, cache) as models:
        return models.load(model, version)


@contextlib.contextmanager
def opened(store: str, cache: Path | None) -> Iterator[ModelStore]:
    """Yields the store. Within the block, loading shows the progress of downloads."""
    with transfer_progress() as progress:
        yield ModelStore(store, cache, progress)


@contextlib.contextmanager
def transfer_progress() -> Iterator[TransferProgress]:
    """Shows a progress bar in bytes for each file; prints nothing if no file is transferred."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"))
    progress = Progress(*columns, TimeRemainingColumn(), console=console)
    tasks: dict[str, TaskID] = {}

    def report(file: str, bytes_done: int, bytes_total: int) -> None:
        progress.start()
        if file not in tasks:
            tasks[file] = progress.add_task(file, total=bytes_total, done="")
        done = f"{human_bytes(bytes_done)} of {human_bytes(bytes_total)}"
        progress.update(tasks[file], completed=bytes_done, done=done)

    try:
        yield report
    finally:
        if tasks:
            progress.stop()
