"""`embedserve verify`: rereads a version, or a part of it, and reports for each table that it is as
published."""

from __future__ import annotations

from pathlib import Path

from embedserve_store import verification
from embedserve_store.format.manifest_checksum import is_sealed
from embedserve_store.parts.part import Part
from embedserve_store.terminal.console import say, table_progress
from embedserve_store.terminal.sizes import human_bytes
from embedserve_store.terminal.stores import load_version


def verify(store: str, model: str, version: str | None, part: str, cache: Path | None) -> None:
    """Checks every byte of a version. For a remote store it checks the cached copy.

    Args:
        part: part whose rows are checked, as NUMBER/COUNT, and no others; "" for the whole version.

    Raises:
        StoreError: there is no such version or part, or a file or table is not as it was published.
        ValueError: ``part`` names no part.
    """
    loaded = load_version(store, cache, model, version, Part.parse(part) if part else None)
    with table_progress() as progress:
        verification.verify(loaded, progress)
    manifest = loaded.manifest
    for table in manifest.tables:
        entries = f", {table.ids.entries:,} ids" if table.ids.rule == "map" else ""
        say(
            f"{table.name}: {table.num_embeddings:,} rows of {table.embedding_dim} {table.dtype}, "
            f"{human_bytes(table.nbytes)}{entries}: as published"
        )
    if not is_sealed((loaded.path / "manifest.json").read_bytes()):
        say("manifest.json: format version 1 has no checksum of it")
    name = f"{manifest.model} version {manifest.version}"
    name = f"part {loaded.part} of {name}" if loaded.part is not None else name
    say(f"{name} is as it was published, in {loaded.path}")
