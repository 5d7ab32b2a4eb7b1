"""Records which parts of a version were compared with the training model's own outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from embedserve_store.errors import StoreError
from embedserve_store.format.json_fields import typed

COMPARED = "compared"
"""Key of the Coverage in Manifest.source; absent if nothing was compared."""


@dataclass(frozen=True)
class Coverage:
    """Coverage of a comparison with the training model's outputs.

    Attributes:
        examples: number of examples that were compared.
        rows: number of distinct rows that were compared, by table; all rows of a table that has
            checksums.
        pooling: pooling of each key whose vectors distinguish sum from mean; empty in versions
            that were published before poolings were recorded.
        unchecked: properties that the inputs could not verify, as a clause for each feature, and
            for weights.
    """

    examples: int
    rows: Mapping[str, int]
    pooling: Mapping[str, str]
    unchecked: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"unchecked": [*self.unchecked]}

    @classmethod
    def from_source(cls, source: dict[str, Any], where: str) -> Self | None:
        """Returns the coverage in Manifest.source; None if it has none.

        Raises:
            StoreError: a field is missing or has another type.
        """
        if COMPARED not in source:
            return None
        where = f"{where}: source"
        data = typed(source, COMPARED, dict, where)
        where = f"{where}.{COMPARED}"
        rows = typed(data, "rows", dict, where)
        pooling = typed({"pooling": {}} | data, "pooling", dict, where)
        unchecked = typed(data, "unchecked", list, where)
        for name in rows:
            typed(rows, name, int, f"{where}.rows")
        for name in pooling:
            typed(pooling, name, str, f"{where}.pooling")
        for clause in unchecked:
            if not isinstance(clause, str):
                raise StoreError(f"{where}.unchecked has {clause!r}, expected strings")
        return cls(typed(data, "examples", int, where), rows, pooling, tuple(unchecked))
