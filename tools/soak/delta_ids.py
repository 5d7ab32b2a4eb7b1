"""Ids that come and go in the soak of deltas: which of them each delta leaves, and their values.

Each delta gives a slot of ids its rows, and the next delta of that slot gives them others. Slots
that none of the last deltas wrote have no ids. All follows from the seqs of the deltas that are
kept, so that trainer, callers and the final comparison agree without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embedserve_store import DeltaLine, IdRule, ModelVersion, TableSpec

ID_DIM = 8
KINDS = {"ids": "int64", "words": "string"}
"""Type of the ids of each table, whose feature has its name."""
SLOTS = 64
WINDOW = 16
"""Number of the last deltas whose slots have ids."""
IDS_PER_SLOT = 10
ID_ROWS = 2 * WINDOW * IDS_PER_SLOT

Slots = dict[int, int]
"""Delta that last wrote a slot, by slot; 0 for the version itself."""


def slots_after(line: DeltaLine, seq: int) -> Slots:
    """Returns the slots that have ids after delta ``seq``."""
    return _slots(delta.seq for delta in islice(line.deltas_in_state(seq), WINDOW))


def _slots(newest_first: Iterable[int]) -> Slots:
    last = [*newest_first]
    oldest_first = [0] * (len(last) < WINDOW) + last[::-1]
    return {seq % SLOTS: seq for seq in oldest_first}


def value_of(seq: int) -> int:
    """Returns the value of the ids that delta ``seq`` wrote. No id has the value 0, which a bag
    without known ids has."""
    return seq + 1


def ids_of(table: str, slot: int) -> list[Any]:
    numbers = range(slot * IDS_PER_SLOT, (slot + 1) * IDS_PER_SLOT)
    return [f"word {one}" if KINDS[table] == "string" else 7 - 10**12 * one for one in numbers]


def tables() -> list[TableSpec]:
    return [
        TableSpec(
            name,
            ID_ROWS,
            ID_DIM,
            (name,),
            "sum",
            "float32",
            ids=IdRule("map", id_type=kind, unknown="skip"),
        )
        for name, kind in KINDS.items()
    ]


def weights() -> dict[str, torch.Tensor]:
    rows = torch.full((ID_ROWS, ID_DIM), float(value_of(0)))
    return {f"ebc.embedding_bags.{name}.weight": rows for name in KINDS}


def vocabularies() -> dict[str, Any]:
    return {name: ids_of(name, 0) for name in KINDS}


def changes(line: DeltaLine, seq: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the rows and the removed ids of delta ``seq``, which follows the last of ``line``."""
    before = [delta.seq for delta in islice(line.deltas_in_state(seq - 1), WINDOW)]
    gone = _slots(before).keys() - _slots([seq, *before[: WINDOW - 1]]).keys()
    values = np.full((IDS_PER_SLOT, ID_DIM), value_of(seq), np.float32)
    rows = {name: (ids_of(name, seq % SLOTS), values) for name in KINDS}
    removed = {name: [one for slot in gone for one in ids_of(name, slot)] for name in KINDS}
    return rows, removed


def differences(version: ModelVersion, slots: Mapping[int, int]) -> list[str]:
    """Returns the tables of a compacted version that do not have the ids of ``slots``."""
    from embedserve_store.ids.string_hashes import hash_strings

    found = []
    for name, kind in KINDS.items():
        expected: dict[int, float] = {}
        for slot, seq in slots.items():
            ids: Any = ids_of(name, slot)
            numbers = hash_strings(ids).tolist() if kind == "string" else ids
            expected |= dict.fromkeys(numbers, value_of(seq))
        id_map, rows = version.id_maps[name], version.tables.rows(name).view(np.float32)
        values: NDArray[np.float32] = rows[id_map.rows, 0]
        if dict(zip(id_map.ids.tolist(), values.tolist(), strict=True)) != expected:
            found.append(name)
    return found
