"""Memory for changed rows: its size, and the error if it is full."""

from __future__ import annotations

from embedserve.config import MIB, ServeSettings
from embedserve_store.model_version import ModelVersion


class RowsFullError(Exception):
    """The changed rows or ids do not fit into the memory that was given for them."""


BYTES_MIN = 256 * MIB
SHARE = 10
"""A tenth of a version's tables may change by default."""


def changed_rows_bytes_max(settings: ServeSettings, version: ModelVersion) -> int:
    """Returns the bytes for changed rows of ``version``: --delta-memory, or its default."""
    return settings.delta_memory or max(BYTES_MIN, version.manifest.nbytes // SHARE)
