"""Ids of the soak of deltas: what the trainer pushes leaves the ids that the comparison expects."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

from soak import delta_ids


class Line:
    """A line of deltas and undos."""

    def __init__(self) -> None:
        self.reverts_to: list[int | None] = []

    def kept(self, last: int) -> Iterator[Any]:
        while last:
            if (to := self.reverts_to[last - 1]) is None:
                yield SimpleNamespace(seq=last)
                last -= 1
            else:
                last = to


def test_pushed_and_removed_ids_leave_those_that_are_expected() -> None:
    """A table as DeltaWriter keeps it: an id that is removed must be there."""
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
