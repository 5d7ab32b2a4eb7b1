"""Rows to publish, changed copies of them, and the expected differences."""

from collections.abc import Callable

import torch

from embedserve_store.comparison.row_diff import RowDiff
from embedserve_store.comparison.version_diff import TableDiff, VersionDiff
from embedserve_store.model_version import ModelVersion

Publish = Callable[..., ModelVersion]
Tables = dict[str, torch.Tensor]

BASE = torch.linspace(-1, 1, 40 * 8).reshape(40, 8)


def single_table(found: VersionDiff) -> TableDiff:
    (table,) = found.tables
    return table


def row_diff_of(found: VersionDiff) -> RowDiff:
    rows = single_table(found).rows
    assert rows is not None
    return rows


def with_rows(changed: dict[int, torch.Tensor | float]) -> torch.Tensor:
    """Returns a copy of BASE with the rows of ``changed``, by row number."""
    rows = BASE.clone()
    for number, row in changed.items():
        rows[number] = row
    return rows
