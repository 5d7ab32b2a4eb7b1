"""Provides a reader with its own copies of the changed rows, as a process with a GPU has them."""

import copy

import numpy as np

from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.rows_reader import RowsReader
from embedserve_store.plans.plan import Plan


class FakeDevice:
    """Copies of the spare rows, as a GPU has them, and a reader in a process of its own."""

    def __init__(self, live: LiveRows, reader: int, plan: Plan) -> None:
        self.live = copy.copy(live)  # as in a forked process
        self.rows = {name: np.zeros_like(rows) for name, rows in live.rows.items()}
        self.uploads, self._view = 0, 0
        self.reader = RowsReader(self.live, reader, plan, self.upload)

    def upload(self, view: int) -> None:
        for group, written in self.live.written_since(self._view):
            for table in group.tables:
                self.rows[table.name][written] = self.live.rows[table.name][written]
            self.uploads += len(written)
        self._view = max(self._view, view)
