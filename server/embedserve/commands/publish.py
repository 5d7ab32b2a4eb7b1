"""`embedserve publish`: a checkpoint's tables as the next version of a model, with a report."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from embedserve.commands.choices import parse_choice
from embedserve.commands.sharding import parse_sharding
from embedserve.terminal.console import hush_torch, say, table_progress
from embedserve.terminal.sigterm import sigterm_interrupts
from embedserve.terminal.sizes import human_bytes, parse_bytes
from embedserve.terminal.stores import transfer_progress
from embedserve_store import PublishedVersion, publish, read_description
from embedserve_store.plans.constraints import read_constraints
from embedserve_store.publishing.pooled_error import PooledError
from embedserve_store.remote.remote_store import RemoteStore, default_cache, is_url
from embedserve_store.remote.upload import upload_version

SKIPPED_SHOWN = 10


@dataclass(frozen=True)
class PublishOptions:
    """What the command line says beside what is published and where to."""

    prefix: str = ""
    dtype: str | None = None
    sharding: str | None = None
    world_size: int | None = None
    constraints: Path | None = None
    device_memory: str | None = None
    max_error: float | None = None
    accept_draft: bool = False


def publish_checkpoint(
    checkpoint: Path, description: Path, store: str, model: str, options: PublishOptions
) -> None:
    """Publishes and says what was published, and what of the checkpoint was not.

    Into a remote store a version is published in a temporary folder first, then uploaded.

    Raises:
        StoreError: the checkpoint, the description or the store cannot be used.
        ValueError: an option cannot be read.
    """
    hush_torch()
    with sigterm_interrupts():
        if not is_url(store):
            published = _publish(checkpoint, description, Path(store), model, options)
            report(published, str(published.path))
            return
        number = RemoteStore(store, default_cache()).next_version(model)
        with tempfile.TemporaryDirectory(prefix="embedserve-") as folder:
            published = _publish(checkpoint, description, Path(folder), model, options)
            with transfer_progress() as progress:
                url = upload_version(published.path, store, number, progress)
        report(published, url)


def _publish(
    checkpoint: Path, description: Path, store: Path, model: str, options: PublishOptions
) -> PublishedVersion:
    memory = options.device_memory
    with table_progress() as progress:
        return publish(
            checkpoint,
            store,
            model=model,
            tables=read_description(description),
            prefix=options.prefix,
            dtype=parse_choice(options.dtype) if options.dtype else None,
            sharding=parse_sharding(options.sharding) if options.sharding else None,
            world_size=options.world_size,
            constraints=read_constraints(options.constraints) if options.constraints else None,
            device_memory_bytes=parse_bytes(memory) if memory else None,
            max_error=options.max_error,
            accept_draft=options.accept_draft,
            progress=progress,
        )


def report(published: PublishedVersion, where: str) -> None:
    """Says what was published to ``where``, how exact it is and what was left out."""
    manifest = published.manifest
    for table in manifest.tables:
        error = published.errors[table.name]
        ids = f", ids by {table.ids.rule}" if table.ids.rule != "rows" else ""
        say(
            f"{table.name}: {table.num_embeddings:,} rows of {table.embedding_dim} "
            f"{table.dtype}{ids}, {human_bytes(table.nbytes)}{describe_error(error)}"
        )
    if published.skipped:
        shown = ", ".join(published.skipped[:SKIPPED_SHOWN])
        more = len(published.skipped) - SKIPPED_SHOWN
        say(
            f"skipped, as not described: {shown}"
            + (f" and {more} more of {len(published.skipped)} entries" if more > 0 else "")
        )
    ranks = published.plan.world_size
    say(
        f"published {manifest.model} version {where.rpartition('/')[2]}: "
        f"{human_bytes(manifest.nbytes)} over {ranks} {'rank' if ranks == 1 else 'ranks'}, "
        f"in {where}"
    )


def describe_error(error: PooledError) -> str:
    """What a dtype saved and what it cost, to put behind a table's size."""
    if not error.bytes_saved and not error.relative_l2:
        return ", exact"
    saved = f" ({human_bytes(error.bytes_saved)} saved)" if error.bytes_saved else ""
    return (
        f"{saved}; pooled answers against float32: relative L2 error {error.relative_l2:.2g}, "
        f"cosine {error.cosine:.6f} (lowest {error.cosine_min:.6f})"
    )
