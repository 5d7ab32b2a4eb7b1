"""Says what of a version was compared with the training model's own answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from embedserve_store.errors import StoreError
from embedserve_store.format.json_fields import typed

COMPARED = "compared"
"""In Manifest.source: a Coverage; absent where nothing was compared."""


@dataclass(frozen=True)
class Coverage:
    """What a comparison with the training model's answers could tell.

    Attributes:
        examples: number of examples that were compared.
        rows: number of distinct rows that were compared, by table; all of a table that has
            checksums.
        pooling: pooling of each key whose vectors tell it from the other pooling; empty in versions
            that were published before this was noted.
        unchecked: what the inputs could not tell, a clause for each feature, and for weights.
    """

    examples: int
    rows: Mapping[str, int]
    pooling: Mapping[str, str]
    unchecked: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "examples": self.examples,
            "rows": dict(self.rows),
            "pooling": dict(self.pooling),
            "unchecked": [*self.unchecked],
        }

    @classmethod
    def from_source(cls, source: dict[str, Any], where: str) -> Self | None:
        """Returns the coverage that Manifest.source has; None where it has none.

        Args:
            where: names the file in errors.

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
