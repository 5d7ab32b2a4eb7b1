"""What is read of a version's tables: ids by feature, and row_wise tables' rows by rank.

Ids are counted. Which rank a row lies on, of a table that is divided by its rows, is looked at in
some batches, which take a bounded share of the event loop's time, and what is counted is divided
as these are. All else, by table and by rank, follows from the plan (lookup_samples.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import random
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedserve.lookup import Batch
from embedserve.metrics.shared_counters import Cells, WorkerCounters
from embedserve.model_info import ModelInfo
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.access_counts import AccessCounts, is_divided_by_rows

OWN_SHARE = 1 / 200
"""Of the event loop's time, that is spent on where rows lie."""
ROWS_LOOKED_AT_MAX = 4096
"""Of one batch: about a tenth of a millisecond. Of a larger one every second or third … row."""
DIVIDED_CELLS = 8192
"""For each rank of each table that is divided by its rows; the tables that come after those that
have room are not told apart by rank."""


def lookup_cells(columns_max: int) -> int:
    """Of a version with up to so many features."""
    return columns_max + DIVIDED_CELLS


class LookupMetrics:
    """What is read of one version.

    Attributes:
        asked: int64 [F] ids, by feature, counted by this process.
    """

    def __init__(
        self,
        model: ModelInfo,
        counters: WorkerCounters,
        columns_max: int,
        own_share: float = OWN_SHARE,
    ) -> None:
        self.asked = np.zeros(len(model.features), np.int64)
        self._model = model
        self._own_share = own_share
        self._asked = counters.allocate(columns_max)
        self._per_rank = counters.allocate(DIVIDED_CELLS)
        self._shown = self.asked.copy()
        # A row that is left out is not read, but where there is an answer for each id.
        self._is_left_out = model.skips_unknown & model.is_pooled
        self._where = _RowToRank(model)
        self._attributed = np.zeros(len(self._where.tables))
        self._look_s = 0.0  # when the next batch is looked at

    def leave(self) -> None:
        """What is counted from now on is not shown."""
        self._asked.detach()
        self._per_rank.detach()

    def observe(self, batch: Batch) -> None:
        """A batch that is looked up."""
        self.asked += batch.ids_per_feature
        if self._where.tables and batch.ids.size and (start_s := perf_counter()) >= self._look_s:
            self._where.look(batch)
            end_s = perf_counter()
            # Of any length around the mean: in step with what comes at regular times it would see
            # the same over and over.
            pause_s = (end_s - start_s) / self._own_share * (0.5 + random())
            self._look_s = end_s + pause_s

    def flush(self, unknown_ids: NDArray[np.int64]) -> None:
        """``unknown_ids`` [F] are those of this process that had no row."""
        self._asked.own[: self.asked.size] += self.asked - self._shown
        self._shown[:] = self.asked
        if self._where.tables:
            self._divide(self._read(self.asked.astype(np.float64), unknown_ids))

    def _divide(self, read: Cells) -> None:
        """Of what was read since the last time, by tables of which a batch was looked at."""
        looked_at = self._where.take()
        total = looked_at.sum(axis=1)
        is_seen = total > 0
        of_tables = self._where.sum_up(read)
        more = (of_tables - self._attributed)[is_seen, None] * looked_at[is_seen]
        own = self._per_rank.own[: looked_at.size].reshape(looked_at.shape)
        own[is_seen] += more / total[is_seen, None]
        self._attributed[is_seen] = of_tables[is_seen]

    def _read(self, requested: Cells, unknown_ids: NDArray[np.number[Any]]) -> Cells:
        read: Cells = requested - np.where(self._is_left_out, unknown_ids, 0.0)
        return read

    def total_asked(self, of: NDArray[np.bool_]) -> Cells:
        """Float64 [F], ids, of the workers ``of`` which it is True."""
        return self._asked.total(of)[: self.asked.size]

    def reads(self, of: NDArray[np.bool_], unknown_ids: Cells) -> AccessCounts:
        """Rows, of the workers ``of`` which it is True; ``unknown_ids`` [F] are theirs."""
        read = self._read(self.total_asked(of), unknown_ids).tolist()
        by_feature = dict(zip(self._model.features, read, strict=True))
        per_rank = self._per_rank.total(of)[: self._where.cells].reshape(
            -1, self._model.plan.world_size
        )
        names = [table.name for table in self._where.tables]
        return AccessCounts(
            by_table={
                table.name: sum(by_feature[feature] for feature in table.feature_names)
                for table in self._model.tables
            },
            by_rank=dict(zip(names, per_rank.tolist(), strict=True)),
        )


class _RowToRank:
    """Finds the ranks of rows.

    The rows of each feature are cut where any of its tables is; all these ranges are numbered,
    feature after feature, so that a batch's rows are found among them at once.

    Attributes:
        tables: those that are divided by their rows, as far as there is room.
        cells: for each of them, of each rank.
    """

    def __init__(self, model: ModelInfo) -> None:
        self._features = len(model.features)
        self._ranks = ranks = model.plan.world_size
        divided = [one for one in model.tables if is_divided_by_rows(model.plan.tables[one.name])]
        self.tables = divided[: DIVIDED_CELLS // ranks]
        self.cells = len(self.tables) * ranks
        # A use is a feature of one of the tables.
        place = {feature: i for i, feature in enumerate(model.features)}
        uses = [(at, place[f]) for at, table in enumerate(self.tables) for f in table.feature_names]
        self._table_of_use, self._feature_of_use = np.array(uses, np.int64).reshape(-1, 2).T
        # The ids of one feature do not reach where the ranges of the next begin.
        span = max(table.num_embeddings for table in model.tables) + 1
        self._bases = np.arange(self._features) * span
        self._cut(_starts(self.tables, model), span)
        self._counts = np.zeros(len(self._starts))

    def _cut(self, starts: NDArray[np.int64], span: int) -> None:
        """At the ``starts`` [tables, ranks] of the ranks' rows; no Python runs for each feature, as
        this is done between two batches when another version takes over."""
        uses = np.arange(len(self._table_of_use))
        bases = self._bases[self._feature_of_use]
        of_uses = starts[self._table_of_use]
        self._starts = np.unique(np.concatenate([self._bases, (bases[:, None] + of_uses).ravel()]))
        # Each use has all ranges of its feature, and in each of these the rows of one rank.
        first, end = np.searchsorted(self._starts, [bases, bases + span])
        use = np.repeat(uses, end - first)
        self._ranges = np.arange(use.size) + np.repeat(first - _before(end - first), end - first)
        rows = self._starts[self._ranges] - bases[use]
        flat = (uses[:, None] * span + of_uses).ravel()
        rank = np.searchsorted(flat, use * span + rows, side="right") - 1 - use * self._ranks
        self._cells_of_ranges = self._table_of_use[use] * self._ranks + rank

    def look(self, batch: Batch) -> None:
        """Counts the rows of a batch by range."""
        # After unknown ids were left out of it.
        ends = batch.lengths.reshape(self._features, -1).sum(axis=1).cumsum()
        step = -(-batch.ids.size // ROWS_LOOKED_AT_MAX)
        places = np.arange(int(random() * step), batch.ids.size, step)
        features = np.searchsorted(ends, places, side="right")
        rows = batch.ids[places] + self._bases[features]
        ranges = np.searchsorted(self._starts, rows, side="right") - 1
        self._counts += np.bincount(ranges, minlength=self._counts.size) * step

    def take(self) -> Cells:
        """[tables, ranks] rows that were looked at since the last time."""
        per_cell = np.zeros(self.cells)
        np.add.at(per_cell, self._cells_of_ranges, self._counts[self._ranges])
        self._counts[:] = 0
        return per_cell.reshape(-1, self._ranks)

    def sum_up(self, read: Cells) -> Cells:
        """[tables], of what is ``read`` of each feature."""
        total = np.zeros(len(self.tables))
        np.add.at(total, self._table_of_use, read[self._feature_of_use])
        return total


def _before(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum of all counts before each."""
    before: NDArray[np.int64] = counts.cumsum() - counts
    return before


def _starts(tables: Sequence[TableSpec], model: ModelInfo) -> NDArray[np.int64]:
    """[tables, ranks], where the rows of each rank begin. A rank without rows begins where the next
    one does, which has them: of those that begin at a row the last is found."""
    plans = [model.plan.tables[table.name] for table in tables]
    rows = [[shard.row_offset for shard in plan.shards] for plan in plans]
    return np.array(rows, np.int64).reshape(-1, model.plan.world_size)
