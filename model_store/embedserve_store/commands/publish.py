"""`embedserve publish`: publishes a checkpoint's tables as the next version of a model, and
reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from embedserve_store import PublishedVersion, publish, read_description
from embedserve_store.commands.inspect import compared_lines
from embedserve_store.commands.per_table_option import parse_per_table_option, parse_sharding
from embedserve_store.commands.plan_view import count_ranks
from embedserve_store.format.manifest import FROM_DESCRIPTION, GOLDENS
from embedserve_store.plans.constraints import read_constraints
from embedserve_store.publishing.pooled_error import PooledError
from embedserve_store.terminal.console import hush_torch, say, table_progress, transfer_progress
from embedserve_store.terminal.sigterm import sigterm_interrupts
from embedserve_store.terminal.sizes import human_bytes, parse_bytes

SKIPPED_SHOWN = 10


@dataclass(frozen=True)
class PublishFlags:
    """Command line flags of `embedserve publish`, not parsed yet; besides --model."""

    prefix: str = ""
    dtype: str | None = None
    sharding: str | None = None
    world_size: int | None = None
    hosts: int | None = None
    constraints: Path | None = None
    device_memory: str | None = None
    max_error: float | None = None
    expected: Path | None = None
    accept_unchecked: bool = False
    accept_draft: bool = False
    layout_changed: bool = False
    if_changed: bool = False
    meta: tuple[str, ...] = ()
    """Entries of the form KEY=VALUE."""


def publish_checkpoint(
    checkpoint: Path, description: Path, store: str, model: str, flags: PublishFlags
) -> None:
    """Publishes a version, and reports what was published and which checkpoint entries were
    skipped.

    Raises:
        StoreError: the checkpoint, the description or the store cannot be used.
        ValueError: an option cannot be parsed.
    """
    hush_torch()
    memory = flags.device_memory
    with sigterm_interrupts(), table_progress() as progress, transfer_progress() as uploading:
        published = publish(
            checkpoint,
            store,
            model=model,
            tables=read_description(description),
            prefix=flags.prefix,
            dtype=parse_per_table_option(flags.dtype) if flags.dtype else None,
            sharding=parse_sharding(flags.sharding) if flags.sharding else None,
            world_size=flags.world_size,
            hosts=flags.hosts,
            constraints=read_constraints(flags.constraints) if flags.constraints else None,
            device_memory_bytes=parse_bytes(memory) if memory else None,
            max_error=flags.max_error,
            expected=flags.expected,
            accept_unchecked=flags.accept_unchecked,
            accept_draft=flags.accept_draft,
            layout_changed=flags.layout_changed,
            if_changed=flags.if_changed,
            meta=_parse_meta(flags.meta),
            progress=progress,
            upload_progress=uploading,
        )
    report(published)


def _parse_meta(given: Sequence[str]) -> dict[str, str]:
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
