"""Index from the rows of row-wise tables to their ranks, for batches that are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from random import random

import numpy as np
from numpy.typing import NDArray

from embedserve.lookup_types import Batch
from embedserve.metrics.shared_counters import Cells
from embedserve.model_info import ModelInfo
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.access_counts import is_divided_by_rows

ROWS_SAMPLED_MAX = 4096
"""Rows sampled of one batch, which takes about 0.1 ms. Of a larger batch every second, third, … row
is sampled."""
DIVIDED_CELLS = 8192
"""Cells for row-wise tables: one for each rank of each table. Tables that no longer fit are not
counted by rank."""


class RowToRank:
    """Interval index from rows to ranks.

    The rows of a feature are split wherever any of its tables is split. The resulting ranges are
    numbered across all features, so that all rows of a batch are located in one search.

    Attributes:
        tables: row-wise tables, as many as fit into DIVIDED_CELLS.
        cells: number of cells: one for each rank of each table.
    """

    def __init__(self, model: ModelInfo) -> None:
        self._features = len(model.features)
        self._ranks = ranks = model.plan.world_size
        divided = [one for one in model.tables if is_divided_by_rows(model.plan.tables[one.name])]
        self.tables = divided[: DIVIDED_CELLS // ranks]
        self.cells = len(self.tables) * ranks
        # A "use" is a (table, feature) pair.
        place = model.feature_positions
        uses = [(at, place[f]) for at, table in enumerate(self.tables) for f in table.feature_names]
        self._table_of_use, self._feature_of_use = np.array(uses, np.int64).reshape(-1, 2).T
        # The span keeps the rows of one feature below the ranges of the next.
        span = max(table.num_embeddings for table in model.tables) + 1
        self._bases = np.arange(self._features) * span
        self._build_ranges(_starts(self.tables, model), span)
        self._counts = np.zeros(len(self._starts))

    def _build_ranges(self, starts: NDArray[np.int64], span: int) -> None:
        """Builds the ranges from ``starts`` [tables, ranks], the first row of each rank. It has no
        Python loop over features, because it runs between two batches when another version takes
        over."""
        uses = np.arange(len(self._table_of_use))
        bases = self._bases[self._feature_of_use]
        of_uses = starts[self._table_of_use]
        self._starts = np.unique(np.concatenate([self._bases, (bases[:, None] + of_uses).ravel()]))
        # Each use covers all ranges of its feature; within a range all rows are on one rank.
        first, end = np.searchsorted(self._starts, [bases, bases + span])
        use = np.repeat(uses, end - first)
        self._ranges = np.arange(use.size) + np.repeat(first - _before(end - first), end - first)
        rows = self._starts[self._ranges] - bases[use]
        flat = (uses[:, None] * span + of_uses).ravel()
        rank = np.searchsorted(flat, use * span + rows, side="right") - 1 - use * self._ranks
        self._cells_of_ranges = self._table_of_use[use] * self._ranks + rank

    def sample(self, batch: Batch) -> None:
        """Counts the sampled rows of a batch by range."""
        # Skipped ids have been removed from the batch and its lengths.
        ends = batch.lengths.reshape(self._features, -1).sum(axis=1).cumsum()
        step = -(-batch.ids.size // ROWS_SAMPLED_MAX)
        places = np.arange(int(random() * step), batch.ids.size, step)
        features = np.searchsorted(ends, places, side="right")
        rows = batch.ids[places] + self._bases[features]
        ranges = np.searchsorted(self._starts, rows, side="right") - 1
        self._counts += np.bincount(ranges, minlength=self._counts.size) * step

    def take_samples(self) -> Cells:
        """Returns [tables, ranks] sampled rows since the last call, and resets the counts."""
        per_cell = np.zeros(self.cells)
        np.add.at(per_cell, self._cells_of_ranges, self._counts[self._ranges])
        self._counts[:] = 0
        return per_cell.reshape(-1, self._ranks)

    def sum_by_table(self, read: Cells) -> Cells:
        """Returns [tables], the sum of ``read`` [F] over the features of each table."""
        total = np.zeros(len(self.tables))
        np.add.at(total, self._table_of_use, read[self._feature_of_use])
        return total


def _before(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the exclusive cumulative sum of ``counts``."""
    before: NDArray[np.int64] = counts.cumsum() - counts
    return before


def _starts(tables: Sequence[TableSpec], model: ModelInfo) -> NDArray[np.int64]:
    """Returns [tables, ranks], the first row of each rank. A rank without rows begins at the row
    where the next non-empty rank begins; the search takes the last rank that begins at a row."""
    plans = [model.plan.tables[table.name] for table in tables]
    rows = [[shard.row_offset for shard in plan.shards] for plan in plans]
    return np.array(rows, np.int64).reshape(-1, model.plan.world_size)
