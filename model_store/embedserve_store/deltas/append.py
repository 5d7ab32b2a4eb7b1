"""Appends the manifest of a delta to its line, which makes the delta visible. Imports no torch."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.delta_manifest import (
    DELTA_SEQ_MAX,
    DELTAS_FOLDER,
    MANIFEST_BYTES_MAX,
    DeltaManifest,
    LinePosition,
    manifest_name,
)
from embedserve_store.publishing.added_file import Write, is_exclusive


def append(write: Write, delta: DeltaManifest) -> LinePosition | None:
    """Writes the manifest of ``delta``, and returns the position after it.

    Returns None if the line has a delta of this seq.

    Args:
        write: writer of new files into the model's folder of deltas.

    Raises:
        InvalidModelError: the delta exceeds a limit: readers would refuse its manifest.
        StoreError: the store cannot be written. If it cannot be reached, it may have the manifest.
    """
    path = f"{delta.model}/{DELTAS_FOLDER}/{delta.line}/{manifest_name(delta.seq)}"
    if delta.seq > DELTA_SEQ_MAX:
        raise InvalidModelError(
            f"{path}: seq is {delta.seq}, the limit is {DELTA_SEQ_MAX}: publish a version, which "
            "begins a new line"
        )
    data = delta.to_bytes()
    if len(data) > MANIFEST_BYTES_MAX:
        examples = delta.goldens.examples if delta.goldens else 0
        raise InvalidModelError(
            f"{path}: {len(data)} bytes, with {len(delta.files)} files and {examples} examples of "
            f"goldens, the limit is {MANIFEST_BYTES_MAX}: push more often, or fewer goldens"
        )
    if not write(path, data):
        return None
    return LinePosition(delta.line, delta.seq, hashlib.sha256(data).hexdigest())


def check_no_overwrites(store: str, folder: str) -> None:
    """Raises StoreError unless the store refuses a delta where another writer has written one.

    Raises UnreachableError if the store cannot be written.
    """
    if not is_exclusive(store, folder):
        raise StoreError(
            f"{store}/{folder}: the store does not refuse a second file of one name, so two "
            "writers could overwrite each other. is_alone=True (undo --alone) says that no other "
            "writer exists"
        )


def as_of_now() -> str:
    """Returns the time as DeltaManifest.as_of has it, to the microsecond."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
