"""Merges the changed rows of several deltas: the last value of each row counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embedserve_store.format.delta_file import ChangedRows


def merged(changes: Sequence[ChangedRows]) -> list[ChangedRows]:
    """Returns one element for each table of ``changes``; of a row's values the last one stays."""
    by_table: dict[str, list[ChangedRows]] = {}
    for change in changes:
        by_table.setdefault(change.table.name, []).append(change)
    return [_last_values(own) for own in by_table.values()]


def _last_values(changes: Sequence[ChangedRows]) -> ChangedRows:
    if len(changes) == 1:
        return changes[0]
    # Is reversed, since np.unique returns the first position of a row.
    numbers, last = np.unique(
        np.concatenate([one.numbers for one in changes])[::-1], return_index=True
    )
    values = np.concatenate([one.values for one in changes])
    return ChangedRows(changes[0].table, numbers, values[len(values) - 1 - last])
