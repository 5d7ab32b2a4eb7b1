"""Versions of a few tables, and changes of their rows."""

from collections.abc import Sequence
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
SHARED_SPECS = (
    TableSpec("movie", 1301, 5, ("history", "candidate"), "sum", "float32"),
    TableSpec("user", 7, 12, ("user",), "sum", "float32"),
    TableSpec("title", 1301, 33, ("candidate", "title"), "sum", "int4"),
    TableSpec("maker", 900, 3, ("title", "maker"), "sum", "float16"),
)
"""Tables that form a group, except user, although movie and maker share no feature."""
State = dict[str, NDArray[np.uint8]]
"""Stored rows of each table, uint8 [num_embeddings, row_bytes]; or of each key, the rows that its
feature can have."""


def version_of(folder: Path, specs: tuple[TableSpec, ...] = SPECS) -> ModelVersion:
    """Returns a version without goldens, whose rows are random bytes."""
    random = np.random.default_rng(0)
    path = folder / "tables.safetensors"
    with path.open("wb") as file:
        file.write(header_bytes(specs))
        for spec in file_order(specs):
            file.write(random.bytes(spec.nbytes))
    info = info_of("shop", list(specs), {})
    return ModelVersion(folder, info.manifest, info.plan, TablesFile.open(path, specs), {})


def state_of(version: ModelVersion) -> State:
    return {spec.name: version.tables.rows(spec.name).copy() for spec in version.manifest.tables}


def random_changes(
    random: np.random.Generator, most: int, specs: Sequence[TableSpec] = SPECS
) -> list[ChangedRows]:
    """Returns changes of up to ``most`` rows of each table."""
    changes = []
    for spec in specs:
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
    """Returns the rows of each key, as a lookup on one rank reads them: all rows that its feature
    can have.

    Args:
        device: spare rows of each table, which are read instead of those in shared memory.
    """
    manifest = live.version.manifest
    counts = manifest.rows_per_feature
    ids = np.concatenate([np.arange(count) for count in counts])
    numbers = reader.rows_in_view(ids, np.array(counts), view)
    parts = np.split(numbers, np.cumsum(counts)[:-1])
    found: State = {}
    first_rows = {table.name: one.first_row for one in live.table_groups for table in one.tables}
    for column in manifest.columns:
        name, part = column.table.name, parts[column.feature]
        start, size = live.tables.offsets[name], column.table.row_bytes
        stop = start + (int(part.max(initial=-1)) + 1) * size
        found[column.key] = live.tables.data[start:stop].reshape(-1, size).take(part, axis=0)
        if device is not None:
            spare = part - first_rows[name]
            found[column.key][spare >= 0] = device[name][spare[spare >= 0]]
    return found


def by_key(live: LiveRows, state: State) -> State:
    """Returns the rows that ``read`` returns in ``state``."""
    manifest = live.version.manifest
    return {
        column.key: state[column.table.name][: manifest.rows_per_feature[column.feature]]
        for column in manifest.columns
    }


def states_equal(one: State, other: State) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in other)


def rows_of(spec: TableSpec, *numbers: int, value: int = 0) -> ChangedRows:
    values = np.full((len(numbers), spec.row_bytes), value, np.uint8)
    return ChangedRows(spec, np.array(numbers, np.int64), values)


def first_values(live: LiveRows, table: str, numbers: NDArray[np.int64]) -> list[float]:
    """Returns the first value of rows of float32, whose numbers are those of kernels."""
    start, size = live.tables.offsets[table], live.tables.tables[table].row_bytes
    at = (start + size * number for number in numbers)
    return [float(live.tables.data[one : one + 4].view(np.float32)[0]) for one in at]
