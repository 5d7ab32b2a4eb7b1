"""Helpers of the tests of changed ids: ids and rows of a line's last delta."""

from __future__ import annotations

from pathlib import Path

from store.deltas.conftest import line_of

from embedserve_store.format.delta_manifest import DeltaManifest


def last_of(store: Path) -> DeltaManifest:
    line = line_of(store)
    return line.manifest(line.seqs()[-1])[0]


def ids_of(store: Path, table: str = "user") -> dict[int, int]:
    """Returns the changed ids of the last delta."""
    change = line_of(store).ids(last_of(store))[table]
    return dict(zip(change.ids.tolist(), change.rows.tolist(), strict=True))


def numbers_of(store: Path) -> list[int]:
    return [int(n) for (change,) in line_of(store).rows(last_of(store)) for n in change.numbers]
