"""Provides changes of rows with given values, and a comparison of states."""

from __future__ import annotations

import numpy as np
from server.deltas.tables import State

from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.table_spec import TableSpec


def states_equal(one: State, other: State) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in other)


def rows_of(spec: TableSpec, *numbers: int, value: int = 0) -> ChangedRows:
    values = np.full((len(numbers), spec.row_bytes), value, np.uint8)
    return ChangedRows(spec, np.array(numbers, np.int64), values)
