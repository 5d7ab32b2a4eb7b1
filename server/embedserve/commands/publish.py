"""`embedserve publish`: a checkpoint's tables as the next version of a model, with a report."""

from __future__ import annotations

from pathlib import Path

from embedserve.commands.console import hush_torch, say, table_progress
from embedserve.commands.sigterm import sigterm_interrupts
from embedserve.commands.sizes import human_bytes
from embedserve_store import (
    PublishedVersion,
    publish_state_dict,
    read_description,
    read_state_dict,
)


def publish(
    checkpoint: Path,
    description: Path,
    store: Path,
    model: str,
    dtype: str | None,
    sharding: str,
    world_size: int,
) -> None:
    """Publishes and says what was published, and what of the checkpoint was not.

    Raises:
        StoreError: the checkpoint, the description or the store cannot be used.
    """
    hush_torch()
    described = read_description(description)
    state_dict = read_state_dict(checkpoint)
    with sigterm_interrupts(), table_progress() as progress:
        published = publish_state_dict(
            state_dict,
            described.tables,
            store,
            model=model,
            is_weighted=described.is_weighted,
            dtype=dtype,
            sharding=sharding,
            world_size=world_size,
            progress=progress,
        )
    report(published)


def report(published: PublishedVersion) -> None:
    """Says what was published, how exact it is and what was left out."""
    manifest = published.manifest
    for table in manifest.tables:
        error = published.errors[table.name]
        say(
            f"{table.name}: {table.num_embeddings:,} rows of {table.embedding_dim} "
            f"{table.dtype}, {human_bytes(table.nbytes)}, pooled answers within "
            f"{error.relative:.2g} of the source's largest"
        )
    if published.skipped:
        say(f"skipped, not described: {', '.join(published.skipped)}")
    ranks = published.plan.world_size
    say(
        f"published {manifest.model} version {published.version}: {human_bytes(manifest.nbytes)} "
        f"over {ranks} {'rank' if ranks == 1 else 'ranks'}, in {published.path}"
    )
