"""`embedserve demo`: trains the demo model, publishes it and reports its quality."""

from __future__ import annotations

from pathlib import Path

from embedserve_store import ModelStore
from embedserve_store.commands.publish import describe_error
from embedserve_store.demo import build_demo
from embedserve_store.demo.labels import labels_path, write_labels
from embedserve_store.terminal.console import hush_torch, say, step_progress
from embedserve_store.terminal.sizes import human_bytes


def demo(
    store: Path,
    model: str,
    dtype: str,
    sharding: str,
    world_size: int,
    checkpoint: Path | None,
    if_missing: bool,
) -> None:
    """Publishes the demo model as the next version of ``model``, with a labels file beside it.

    Raises:
        StoreError: the store or the checkpoint cannot be written, or an option is wrong.
        ValueError: ``if_missing`` is combined with ``checkpoint``.
    """
    if if_missing and checkpoint is not None:
        raise ValueError("--if-missing may train nothing: give it without --checkpoint")
    if if_missing and store.is_dir() and model in ModelStore(store).models():
        if not labels_path(store, model).exists():
            write_labels(store, model)
        say(f"{store} has model {model} already")
        return
    hush_torch()
    with step_progress("training on movie ratings") as progress:
        report = build_demo(
            store,
            model=model,
            dtype=dtype,
            sharding=sharding,
            world_size=world_size,
            checkpoint=checkpoint,
            progress=progress,
        )
    published, trained = report.published, report.trained
    for table in published.manifest.tables:
        say(
            f"{table.name}: {table.num_embeddings:,} rows of {table.embedding_dim} {table.dtype}, "
            f"{table.pooling} of {', '.join(table.feature_names)}, {human_bytes(table.nbytes)}"
            f"{describe_error(published.errors[table.name])}"
        )
    say(
        f"trained on {len(trained.train):,} ratings in {report.train_s:.1f} s; on the "
        f"{len(trained.held_out):,} held out RMSE {trained.errors.rmse:.3f}, where always "
        f"predicting the mean has {trained.constant_errors.rmse:.3f}"
    )
    write_labels(store, model)
    say(f"published {model}: {published.path}; titles of movies: {labels_path(store, model)}")
