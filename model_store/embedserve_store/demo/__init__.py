"""Trains the demo's movie tables in seconds on bundled real ratings, and publishes them.

The command line shows the DemoReport that build_demo returns. Prints nothing, and importing it does
not import torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from embedserve_store.errors import StoreError
from embedserve_store.writing.staging import check_writable

if TYPE_CHECKING:
    import torch

    from embedserve_store.demo.train import Trained
    from embedserve_store.publishing.publish_source import Choice
    from embedserve_store.publishing.version_writer import PublishedVersion

__all__ = ["DemoReport", "build_demo", "save_checkpoint"]


@dataclass(frozen=True)
class DemoReport:
    """Result of build_demo."""

    published: PublishedVersion
    trained: Trained
    train_s: float


def build_demo(
    store: str | os.PathLike[str],
    *,
    model: str = "movies",
    dtype: Choice = "float32",
    sharding: Choice = "row_wise",
    world_size: int = 2,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> DemoReport:
    """Trains the demo model on the CPU and publishes its tables as a new version of ``model``.

    Args:
        dtype, sharding, world_size: options of embedserve_store.publish.
        checkpoint: path of a file for the whole model's state dict, with its description (.yaml)
            and vocabularies (.TABLE.txt) beside it. None: no checkpoint is written.
        progress: callback after every step with the steps done, the total steps and the loss.

    Raises:
        StoreError: the version cannot be published or the checkpoint cannot be written. Errors that
            can be detected before training are raised before it.
    """
    from embedserve_store.demo.data import load
    from embedserve_store.demo.model import make_collection
    from embedserve_store.demo.train import train
    from embedserve_store.demo.vocabularies import RULES, vocabularies, write_description
    from embedserve_store.publishing.publish import check_options, publish
    from embedserve_store.sources.live import describe

    data = load()
    tables = describe(make_collection(data))
    check_options(
        tables,
        store,
        model=model,
        dtype=dtype,
        sharding=sharding,
        world_size=world_size,
    )
    if checkpoint is not None:
        checkpoint = Path(checkpoint)
        check_checkpoint_path(checkpoint)
    start = time.perf_counter()
    trained = train(data, progress=progress)
    train_s = time.perf_counter() - start
    if checkpoint is not None:
        save_checkpoint(trained.model, checkpoint)
        write_description(data, tables, checkpoint.with_suffix(".yaml"))
    published = publish(
        trained.model.ebc,
        store,
        model=model,
        dtype=dtype,
        ids=RULES,
        vocabularies=vocabularies(data),
        sharding=sharding,
        world_size=world_size,
    )
    return DemoReport(published, trained, train_s)


def save_checkpoint(model: torch.nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes the state dict of ``model``; torch.load reads it with weights_only=True.

    For the whole demo model, the keys of the tables are ebc.embedding_bags.TABLE.weight, float32
    [rows, dim]. For its EmbeddingBagCollection alone, they are embedding_bags.TABLE.weight.

    Raises:
        StoreError: ``path`` cannot be written.
    """
    import torch

    check_checkpoint_path(path)
    try:
        torch.save(model.state_dict(), path)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise StoreError(f"{path}: the checkpoint cannot be written: {reason}") from error


def check_checkpoint_path(path: str | os.PathLike[str]) -> None:
    """Raises StoreError if a checkpoint cannot be written to ``path``."""
    path = Path(path)
    if path.is_dir():
        raise StoreError(f"{path}: the checkpoint cannot be written: it is a folder")
    if not path.parent.exists():
        raise StoreError(f"{path}: the checkpoint cannot be written: {path.parent} does not exist")
    check_writable(path.parent)
