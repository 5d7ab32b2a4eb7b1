"""Helpers of the tests of signed deltas: a push, and the line read with public keys."""

from __future__ import annotations

from pathlib import Path

from store.deltas.conftest import rows

from embedserve_store import DeltaLine, DeltaWriter, ModelStore
from embedserve_store.deltas.signing import trusted_keys


def push(writer: DeltaWriter) -> int:
    return writer.push_rows({"tag": ([writer.seq], rows("tag", 1, seed=writer.seq))})


def line_of(store: Path, keys: Path, version: int = 1) -> DeltaLine:
    models = ModelStore(store)
    return DeltaLine(models, models.manifest("m", version), trusted_keys(keys))
