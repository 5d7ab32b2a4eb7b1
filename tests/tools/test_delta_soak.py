"""Tests of the soak of deltas: its expected ids, and undos."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from soak import delta_ids, deltas
from soak.delta_report import Report
from soak.deltas import UNDONE_MAX, DeltaSoak

from embedserve_store import StoreError


class Line:
    """A line of deltas and undos."""

    def __init__(self) -> None:
        self.reverts_to: list[int | None] = []

    def deltas_in_state(self, last: int) -> Iterator[Any]:
        while last:
            if (to := self.reverts_to[last - 1]) is None:
                yield SimpleNamespace(seq=last)
                last -= 1
            else:
                last = to


def test_pushed_and_removed_ids_match_the_expected_ids() -> None:
    """Uses a table as DeltaWriter keeps it, where only an existing id can be removed."""
    random, line = Random(3), Line()
    states: list[dict[Any, int]] = [
        dict.fromkeys(delta_ids.vocabularies()["words"], delta_ids.value_of(0))
    ]
    for seq in range(1, 600):
        if random.random() < 0.05:
            to = random.randrange(max(0, seq - 100), seq)
            line.reverts_to.append(to)
            states.append(states[to])
        else:
            line.reverts_to.append(None)
            rows, removed = delta_ids.changes(line, seq)  # type: ignore[arg-type]
            state = dict(states[-1])
            for one in removed["words"]:
                del state[one]
            ids, values = rows["words"]
            assert not {*ids} & {*removed["words"]}
            states.append(state | dict.fromkeys(ids, int(values[0, 0])))
        slots = delta_ids.slots_after(line, seq)  # type: ignore[arg-type]
        assert states[-1] == {
            one: delta_ids.value_of(delta)
            for slot, delta in slots.items()
            for one in delta_ids.ids_of("words", slot)
        }
        assert len(states[-1]) <= delta_ids.ID_ROWS


@pytest.mark.parametrize(("last", "undone_max"), [(10 * UNDONE_MAX, UNDONE_MAX), (3, 3)])
def test_undo_returns_the_number_of_undone_deltas(
    last: int, undone_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    soak = DeltaSoak.__new__(DeltaSoak)
    soak._store, soak._random, soak.report = Path("store"), Random(0), Report()
    monkeypatch.setattr(soak, "_line", lambda: SimpleNamespace(seqs=lambda: [last]))
    reverted: list[int] = []
    monkeypatch.setattr(deltas, "undo_deltas", lambda *_, to, **__: reverted.append(to))
    for _ in range(20):
        count = soak._undo()
        assert 0 < count <= undone_max
        assert reverted[-1] == last - count
    monkeypatch.setattr(deltas, "undo_deltas", Mock(side_effect=StoreError("nothing to undo")))
    assert soak._undo() == 0
    assert soak.report.counts["undos"] == 20
