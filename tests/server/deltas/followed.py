"""A store with one model, its training job, and the follower of its deltas."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pooled import collection
from server.deltas.tables import first_values
from torchrec import PoolingType

from embedserve.deltas.bounded_line import BoundedLine
from embedserve.deltas.changed_rows_memory import RowsFullError
from embedserve.deltas.follower import DeltaFollower
from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.merge_changes import TableChange
from embedserve.deltas.read_changes import CheckRows
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.rows_writer import RowsWriter
from embedserve.deltas.status import SharedDeltaState
from embedserve_store import DeltaWriter, ModelStore, publish
from embedserve_store.format.delta_manifest import manifest_name
from embedserve_store.format.manifest_checksum import sealed_json
from embedserve_store.goldens.reference_pooling import RowsOf

ROWS = 20


class Rows(RowsWriter):
    """Changed rows in a dict, with room for ``room`` rows."""

    room = 100

    def __init__(self, live: LiveRows) -> None:
        super().__init__(live)
        self.rows: dict[int, float] = {}
        self.steps: list[int] = []

    def apply(
        self,
        seq: int,
        changes: Sequence[TableChange],
        check: Callable[[RowsOf], None] | None = None,
    ) -> None:
        values = np.zeros((ROWS, 16), np.uint8)
        for change in changes:
            change.write_to(values, change.numbers)
        rows = {
            int(number): float(values.view(np.float32)[number, 0])
            for change in changes
            for number in change.numbers
        }
        if len(self.rows | rows) > self.room:
            raise RowsFullError(f"no room for delta {seq}")
        assert [len({change.table.name for change in changes})] == [len(changes)]
        super().apply(seq, changes, check)
        self.rows |= rows
        self.steps.append(seq)


class Followed:
    """A store with one model, its training job, and a follower."""

    def __init__(self, folder: Path) -> None:
        ebc = collection([("t", ROWS, 4, ["f"], PoolingType.SUM)])
        publish(ebc, folder, model="m", dtype="float32")
        self.writer = DeltaWriter(folder, model="m")
        self.follow(folder, 1)

    def follow(self, folder: Path, number: int) -> None:
        """Follows the line of a version, like a server that starts with it."""
        self.deltas = folder / "m/deltas/1"
        self.models = ModelStore(folder)
        version = self.models.load("m", number)
        self.line = BoundedLine(self.models, version.manifest)
        self.live = LiveRows(version, 1 << 20, 2, undo=5)
        self.published = version.tables.rows("t").view(np.float32)[:, 0].copy()
        self._reader = RowsReader(self.live, 0, version.plan)
        self.shared = SharedDeltaState(self.live, has_broker=True)
        self.status, self.hold = self.shared.status, self.shared.hold
        self.goldens = self.shared.goldens
        assert self.shared.broker_connected is not None
        self.broker_connected = self.shared.broker_connected
        self.follower = self.started()

    def started(self, check_on_device: CheckRows | None = None) -> DeltaFollower:
        made = DeltaFollower("m", self.line, self.shared, 1 << 20, check_on_device)
        self.rows = Rows(self.live)
        made._rows = self.rows
        return made

    def push(self, *rows: int, value: float = 1.0) -> int:
        values = np.full((len(rows), 4), value, np.float32)
        return self.writer.push_rows({"t": (list(rows), values)})

    def edit(self, seq: int, change: Callable[[Any], None]) -> None:
        path = self.deltas / manifest_name(seq)
        data = json.loads(path.read_bytes())
        change(data)
        path.unlink()
        path.write_bytes(sealed_json(data))

    def damage(self, seq: int) -> Callable[[], None]:
        """Damages the rows of a delta; the result is a function that repairs them."""
        (path,) = self.deltas.glob(f"{seq:020d}.*.safetensors")
        whole = path.read_bytes()
        path.unlink()
        path.write_bytes(whole[:-1] + b"!")

        def repair() -> None:
            path.unlink()
            path.write_bytes(whole)

        return repair

    def changed(self) -> dict[int, float]:
        """Returns the first value of each row that lookups read changed from its published
        value."""
        view, _ = self._reader.begin()
        numbers = self._reader.rows_in_view(np.arange(ROWS), np.array([ROWS]), view)
        found = first_values(self.live, "t", numbers)
        self._reader.end(view)
        return {i: value for i, value in enumerate(found) if value != self.published[i]}

    def poll(self) -> tuple[str, int]:
        """Polls once; returns (state, seq)."""
        self.follower.poll_once()
        return self.state, self.live.seq

    @property
    def state(self) -> str:
        return self.status.read().state
