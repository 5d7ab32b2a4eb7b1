"""Helpers of the tests of changed ids: ids and rows of a line's last delta, and lost responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embedserve_store import DeltaLine, ModelStore
from embedserve_store.deltas import line_appender
from embedserve_store.deltas.append import append
from embedserve_store.errors import UnreachableError
from embedserve_store.format.delta_manifest import DeltaManifest


def line_of(store: Path) -> DeltaLine:
    models = ModelStore(store)
    return DeltaLine(models, models.manifest("m", 1))


def last_of(store: Path) -> DeltaManifest:
    line = line_of(store)
    return line.manifest(line.seqs()[-1])[0]


def ids_of(store: Path, table: str = "user") -> dict[int, int]:
    """Returns the changed ids of the last delta."""
    change = line_of(store).ids(last_of(store))[table]
    return dict(zip(change.ids.tolist(), change.rows.tolist(), strict=True))


def numbers_of(store: Path) -> list[int]:
    return [int(n) for (change,) in line_of(store).rows(last_of(store)) for n in change.numbers]


def lose_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes pushes fail after the store has their deltas."""

    def lose(*arguments: Any) -> None:
        append(*arguments)
        raise UnreachableError("timed out")

    monkeypatch.setattr(line_appender, "append", lose)
