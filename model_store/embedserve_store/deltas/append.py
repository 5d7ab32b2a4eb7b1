"""Appends the manifest of a delta to its line, which makes the delta visible. Imports no torch."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.delta_manifest import (
    FOLDER,
    MANIFEST_BYTES_MAX,
    DeltaManifest,
    LinePosition,
    manifest_name,
)
from embedserve_store.publishing.added_file import Write, check_exclusive


def append(write: Write, delta: DeltaManifest) -> LinePosition | None:
    """Writes the manifest of ``delta``, and returns the position after it.

    Returns None if the line has a delta of this seq.

    Args:
        write: writer of new files into the model's folder of deltas.

    Raises:
        InvalidModelError: the manifest is larger than MANIFEST_BYTES_MAX.
        StoreError: the store cannot be written.
    """
    data = delta.to_bytes()
    if len(data) > MANIFEST_BYTES_MAX:
        examples = delta.goldens.examples if delta.goldens else 0
        raise InvalidModelError(
            f"delta {delta.seq} of {delta.model!r}: its manifest has {len(data)} bytes, with "
            f"{len(delta.files)} files and {examples} examples of goldens, the limit is "
            f"{MANIFEST_BYTES_MAX}: push more often, or fewer goldens"
        )
    if not write(f"{delta.model}/{FOLDER}/{delta.line}/{manifest_name(delta.seq)}", data):
        return None
    return LinePosition(delta.line, delta.seq, hashlib.sha256(data).hexdigest())


def check_no_overwrites(store: str, folder: str) -> None:
    """Raises StoreError unless the store refuses a delta where another writer has written one."""
    try:
        check_exclusive(store, folder)
    except StoreError as error:
        raise StoreError(f"{error}: is_alone=True says that there is no other") from error


def now() -> str:
    """Returns the time as DeltaManifest.as_of has it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
