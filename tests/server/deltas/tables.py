"""A version of two features on one table and one on another, and changes of its rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from server.fake_models import info_of

from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.rows_reader import RowsReader
from embedserve_store import ModelVersion
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.format.tables_file import TablesFile, file_order, header_bytes

SPECS = (
    TableSpec("movie", 1301, 5, ("history", "candidate"), "sum", "float32"),
    TableSpec("user", 7, 12, ("user",), "sum", "float32"),
)
FEATURES = {"history": "movie", "candidate": "movie", "user": "user"}
State = dict[str, NDArray[np.uint8]]
"""Stored rows of each table, uint8 [num_embeddings, row_bytes]."""


def version_of(folder: Path) -> ModelVersion:
    """Returns a version without goldens, whose rows are random bytes."""
    random = np.random.default_rng(0)
    path = folder / "tables.safetensors"
    with path.open("wb") as file:
        file.write(header_bytes(SPECS))
        for spec in file_order(SPECS):
            file.write(random.bytes(spec.nbytes))
    info = info_of("shop", list(SPECS), {})
    return ModelVersion(folder, info.manifest, info.plan, TablesFile.open(path, SPECS), {})


def state_of(version: ModelVersion) -> State:
    return {spec.name: version.tables.rows(spec.name).copy() for spec in SPECS}


def random_changes(random: np.random.Generator, most: int) -> list[ChangedRows]:
    """Returns changes of up to ``most`` rows of each table."""
    changes = []
    for spec in SPECS:
        count = int(random.integers(0, min(most, spec.num_embeddings) + 1))
        numbers = np.sort(random.choice(spec.num_embeddings, count, replace=False))
        values = random.integers(0, 256, (count, spec.row_bytes), np.uint8)
        changes.append(ChangedRows(spec, numbers, values))
    return changes


def changed(state: State, changes: list[ChangedRows]) -> State:
    """Returns ``state`` with ``changes``."""
    after = dict(state)
    for change in changes:
        rows = state[change.table.name].copy()
        rows[change.numbers] = change.values
        after[change.table.name] = rows
    return after


def read(live: LiveRows, reader: RowsReader, view: int, device: State | None = None) -> State:
    """Returns all rows as a lookup on one rank reads them, once through each feature.

    Args:
        device: spare rows of each table that are read instead of those in shared memory.
    """
    counts = [live.spares[table].table.num_embeddings for table in FEATURES.values()]
    ids = np.concatenate([np.arange(count) for count in counts])
    numbers = reader.newest(ids, np.array(counts), view)
    found: State = {}
    for (feature, table), part in zip(
        FEATURES.items(), np.split(numbers, np.cumsum(counts)[:-1]), strict=True
    ):
        start, size = live.tables.offsets[table], live.spares[table].table.row_bytes
        at = start + part[:, None] * size + np.arange(size)
        found[feature] = live.tables.data[at]
        if device is not None:
            spare = part - live.spares[table].first_row
            found[feature][spare >= 0] = device[table][spare[spare >= 0]]
    return found


def by_feature(state: State) -> State:
    return {feature: state[table] for feature, table in FEATURES.items()}
