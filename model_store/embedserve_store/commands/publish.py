"""`embedserve publish`: publishes a checkpoint's tables as the next version of a model, and
reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from embedserve_store import PublishedVersion, publish, read_description
from embedserve_store.commands.inspect import compared_lines
from embedserve_store.commands.plan_view import count_ranks
from embedserve_store.format.manifest import FROM_DESCRIPTION, GOLDENS
from embedserve_store.publishing.options import PublishOptions
from embedserve_store.publishing.pooled_error import PooledError
from embedserve_store.terminal.console import hush_torch, say, table_progress, transfer_progress
from embedserve_store.terminal.sizes import human_bytes

SKIPPED_SHOWN = 10


def publish_checkpoint(
    checkpoint: Path, description: Path, store: str, model: str, **options: Unpack[PublishOptions]
) -> None:
    """Publishes a version, and reports what was published and which checkpoint entries were
    skipped."""
    hush_torch()
    with table_progress() as progress, transfer_progress() as uploading:
        options["progress"], options["upload_progress"] = progress, uploading
        tables = read_description(description)
        published = publish(checkpoint, store, model=model, tables=tables, **options)
    report(published)


def parse_meta(given: Sequence[str]) -> dict[str, str]:
    """Parses entries KEY=VALUE. Raises ValueError."""
    meta: dict[str, str] = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not key or not equals:
            raise ValueError(f"--meta is {one!r}, expected KEY=VALUE, such as run=8141")
        if key in meta:
            raise ValueError(f"--meta says {key!r} twice")
        meta[key] = value
    return meta


def report(published: PublishedVersion) -> None:
    """Prints what was published, its error against float32, and what was skipped."""
    manifest = published.manifest
    if not published.is_new:
        say(
            f"{manifest.model} version {published.version} has the same rows, tables, id rules and "
            f"plan: nothing was published; it is {published.where}"
        )
        return
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
    for table in manifest.tables:
        if table.ids.rule == "map" and table.ids.entries < table.num_embeddings:
            missing = table.num_embeddings - table.ids.entries
            say(
                f"{table.name}: its vocabulary has {table.ids.entries:,} ids for "
                f"{table.num_embeddings:,} rows: {missing:,} rows have no id"
            )
    if manifest.source[GOLDENS] == FROM_DESCRIPTION:
        say("the description was not checked against the training model's answers: see --expected")
    for line in compared_lines(manifest):
        say(line)
    hosts = published.plan.hosts
    if hosts is not None:
        for part, nbytes in enumerate(hosts.bytes_per_part(manifest.tables)):
            say(f"part {part} of {hosts.parts}: {human_bytes(nbytes)}")
    ranks = count_ranks(published.plan.world_size)
    over = ranks if hosts is None else f"{hosts.parts} hosts with {ranks} each"
    say(
        f"published {manifest.model} version {published.version}: "
        f"{human_bytes(manifest.nbytes)} over {over}, in {published.where}"
    )


def describe_error(error: PooledError) -> str:
    """Returns the bytes saved by a dtype and its error, as a suffix to a table's size."""
    if not error.bytes_saved and not error.relative_l2:
        return ", exact"
    saved = f" ({human_bytes(error.bytes_saved)} saved)" if error.bytes_saved else ""
    return (
        f"{saved}; pooled answers against float32: relative L2 error {error.relative_l2:.2g}, "
        f"cosine {error.cosine:.6f} (lowest {error.cosine_min:.6f})"
    )
