"""Access counts of a version's tables: ids by feature, and reads of row-wise tables by rank.

Every id is counted, and each id without a row. The ranks of the rows of row-wise tables are found
for a sample of the batches, within a bounded share of the event loop's time, and the counted reads
are divided in the sampled proportions. All other counts by table and rank follow from the plan.
Bytes follow from lookups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import random
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from embedserve.lookup_types import Batch
from embedserve.metrics.families import Sample
from embedserve.metrics.shared_counters import Cells, WorkerCounters
from embedserve.model_info import ModelInfo
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.access_counts import (
    AccessCounts,
    is_divided_by_rows,
    reads_per_rank,
    row_read_bytes,
)

SAMPLING_SHARE = 1 / 200
"""Largest share of the event loop's time spent on finding the ranks of rows."""
ROWS_SAMPLED_MAX = 4096
"""Rows sampled of one batch, which takes about 0.1 ms. Of a larger batch every second, third, … row
is sampled."""
DIVIDED_CELLS = 8192
"""Cells for row-wise tables: one for each rank of each table. Tables that no longer fit are not
counted by rank."""


def lookup_cells(columns_max: int) -> int:
    """Returns the number of cells needed for a version with up to ``columns_max`` features."""
    return 2 * columns_max + DIVIDED_CELLS


class LookupMetrics:
    """Access counts of one version."""

    def __init__(
        self,
        model: ModelInfo,
        counters: WorkerCounters,
        columns_max: int,
        sampling_share: float = SAMPLING_SHARE,
    ) -> None:
        self._model = model
        self._features = len(model.features)
        self._sampling_share = sampling_share
        self._requested = counters.allocate(columns_max)
        self._unknown = counters.allocate(columns_max)
        self._per_rank = counters.allocate(DIVIDED_CELLS)
        # A skipped id reads no row, except in an unpooled model, where it is read and zeroed.
        self._is_left_out = model.skips_unknown & model.is_pooled
        self._index = _RowToRank(model)
        self._next_sample_s = 0.0  # time at which the next batch is sampled

    def observe(self, batch: Batch) -> None:
        """Counts the ids of a batch that is looked up, and samples its rows when a sample is
        due."""
        self._requested.own[: self._features] += batch.ids_per_feature
        if batch.unknown_counts is not None:
            self._unknown.own[: self._features] += batch.unknown_counts.sum(axis=0)
        is_indexed = self._index.tables and batch.ids.size
        if is_indexed and (start_s := perf_counter()) >= self._next_sample_s:
            self._index.sample(batch)
            end_s = perf_counter()
            # A random pause around the mean: a fixed pause could stay in step with periodic
            # traffic and sample the same requests every time.
            pause_s = (end_s - start_s) / self._sampling_share * (0.5 + random())
            self._next_sample_s = end_s + pause_s

    def flush(self) -> None:
        """Divides the reads since the last flush among the ranks, in the sampled proportions. A
        table without samples is left for a later flush."""
        if not self._index.tables:
            return
        sampled = self._index.take_samples()
        total = sampled.sum(axis=1)
        has_samples = total > 0
        own = self._per_rank.own[: sampled.size].reshape(sampled.shape)
        read = self._index.sum_by_table(self._reads(self._requested.own, self._unknown.own))
        # Rounding must not make a counter smaller, which would look like a restart.
        more = np.maximum(read - own.sum(axis=1), 0.0)[has_samples, None] * sampled[has_samples]
        own[has_samples] += more / total[has_samples, None]

    def _reads(self, requested: Cells, unknown: Cells) -> Cells:
        """Returns the rows read, [F], for the cells of requested ids and of ids without a row."""
        count = self._features
        read: Cells = requested[:count] - np.where(self._is_left_out, unknown[:count], 0.0)
        return read

    def unknown_ids(self) -> Cells:
        """Returns float64 [F], ids without a row, over all workers that serve this version. During
        a switch the workers change at slightly different moments."""
        return self._unknown.total()[: self._features]

    def reads(self) -> AccessCounts:
        """Returns the rows read by all workers."""
        model, ranks = self._model, self._model.plan.world_size
        read = self._reads(self._requested.total(), self._unknown.total()).tolist()
        by_feature = dict(zip(model.features, read, strict=True))
        per_rank = self._per_rank.total()[: self._index.cells].reshape(-1, ranks)
        names = [table.name for table in self._index.tables]
        return AccessCounts(
            by_table={
                table.name: sum(by_feature[feature] for feature in table.feature_names)
                for table in model.tables
            },
            by_rank=dict(zip(names, per_rank.tolist(), strict=True)),
        )

    def samples(self, labels: Sequence[str]) -> Iterator[Sample]:
        """Yields the samples of a version with ``labels``."""
        model, plan, reads = self._model, self._model.plan, self.reads()
        unknown_ids = self.unknown_ids()
        for i in np.flatnonzero(~model.rejects_unknown):
            yield "embedserve_unknown_ids", [*labels, model.features[i]], float(unknown_ids[i])
        for feature, count in zip(model.features, self._requested.total().tolist(), strict=False):
            yield "embedserve_feature_ids", [*labels, feature], count
        for table in model.tables:
            count = reads.by_table[table.name]
            nbytes = count * row_read_bytes(plan.tables[table.name], table, model.device_type)
            yield "embedserve_table_lookups", [*labels, table.name], count
            yield "embedserve_table_read_bytes", [*labels, table.name], nbytes
        for name, counts in reads.by_rank.items():
            for rank, count in enumerate(counts):
                yield "embedserve_row_wise_lookups", [*labels, name, str(rank)], count
        per_rank = reads_per_rank(plan, model.tables, reads, model.device_type)
        for rank, (lookups, nbytes) in enumerate(zip(*per_rank, strict=True)):
            yield "embedserve_rank_lookups", [*labels, str(rank)], lookups
            yield "embedserve_rank_read_bytes", [*labels, str(rank)], nbytes


class _RowToRank:
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
        """Builds the ranges from ``starts`` [tables, ranks], the first row of each rank. It runs
        between two batches when another version takes over, so that it has no Python loop over
        features."""
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
