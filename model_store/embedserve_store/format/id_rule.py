"""Ids as callers have them: the rule by which each table turns an id into a row number.

A rule is a frozen value that the manifest stores. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from embedserve_store.errors import StoreError

RULES = ("rows", "modulo", "map")
ID_TYPES = ("int64", "string")
UNKNOWN = ("error", "skip", "row")
ENTRIES_MAX = 2**32 - 1
"""Maps hold positions and rows as uint32."""


@dataclass(frozen=True)
class IdRule:
    """How ids of a table become row numbers.

    rows: an id is a row number. modulo: row = id mod modulus + offset, where mod is never
    negative, as in Python and torch.remainder. map: a stored vocabulary says the row.
    """

    rule: str = "rows"
    modulus: int = 0
    """modulo only: 1 to the table's rows."""
    offset: int = 0
    """modulo only."""
    id_type: str = "int64"
    """map only: int64, or string (UTF-8, known by their 64-bit hash)."""
    entries: int = 0
    """map only: ids in the vocabulary."""
    sha256: str = ""
    """map only: of the table's tensors in ids.safetensors, hexadecimal."""
    examples: tuple[str, ...] = field(default=(), compare=False)
    """map of strings only: some that the vocabulary holds, since their hashes tell nobody."""
    unknown: str = "error"
    """What becomes of an id that has no row, for rows and map: error refuses the request, skip
    leaves it out of its bag, row looks up default_row instead."""
    default_row: int = 0
    """Where unknown is row."""

    def to_json(self) -> dict[str, Any]:
        """Only what the rule uses."""
        data: dict[str, Any] = {"rule": self.rule}
        if self.rule == "modulo":
            return data | {"modulus": self.modulus, "offset": self.offset}
        if self.rule == "map":
            data |= {"id_type": self.id_type, "entries": self.entries, "sha256": self.sha256}
            if self.id_type == "string":
                data["examples"] = list(self.examples)
        data["unknown"] = self.unknown
        if self.unknown == "row":
            data["default_row"] = self.default_row
        return data

    @classmethod
    def from_json(cls, data: Any, where: str) -> IdRule:
        """Raises StoreError, led by ``where``: unknown or missing keys, or of a wrong type."""
        if not isinstance(data, Mapping):
            raise StoreError(f"{where}: expected a JSON object")
        rule = data.get("rule")
        if rule not in RULES:
            raise StoreError(f"{where}: rule is {rule!r}, expected one of {', '.join(RULES)}")
        if rule == "rows":
            data = {"unknown": "error"} | dict(data)  # format 1 has no more than the rule
        names = [one.name for one in fields(cls)]
        given = {name: data[name] for name in names if name in data}
        if isinstance(given.get("examples"), list):
            given["examples"] = tuple(given["examples"])
        result = cls(**given)
        result._check_types(where)
        expected = result.to_json()
        if data.keys() != expected.keys():
            found = sorted(map(str, data))
            raise StoreError(f"{where}: has {found}, expected {sorted(expected)}")
        return result

    def check(self, num_embeddings: int, where: str) -> None:
        """Raises StoreError, led by ``where``, unless the rule makes sense for a table of
        ``num_embeddings`` rows."""
        self._check_types(where)
        _check_choice("rule", self.rule, RULES, where)
        _check_choice("id_type", self.id_type, ID_TYPES, where)
        _check_choice("unknown", self.unknown, UNKNOWN, where)
        self._check_unused(where)
        last = num_embeddings - 1
        if self.rule == "modulo":
            _check_range("modulus", self.modulus, 1, num_embeddings, where)
            _check_range("offset", self.offset, 0, num_embeddings - self.modulus, where)
        if self.rule == "map":
            _check_range("entries", self.entries, 0, ENTRIES_MAX, where)
            if last > ENTRIES_MAX:
                raise StoreError(
                    f"{where}: rule is 'map' for a table of {num_embeddings} rows: maps hold rows "
                    f"up to {ENTRIES_MAX}"
                )
        _check_range("default_row", self.default_row, 0, last, where)

    def _check_types(self, where: str) -> None:
        for one in fields(self):
            value, kind = getattr(self, one.name), type(one.default)
            if type(value) is not kind:  # a bool is no int here
                raise StoreError(f"{where}: {one.name} is {value!r}, expected {kind.__name__}")
        if not all(isinstance(one, str) for one in self.examples):
            raise StoreError(f"{where}: examples is {list(self.examples)}, expected strings")

    def _check_unused(self, where: str) -> None:
        used = self.to_json()
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name not in used and value != one.default:
                given = f"rule {self.rule!r}"
                if self.rule != "modulo" and one.name == "default_row":
                    given = f"unknown {self.unknown!r}"
                raise StoreError(f"{where}: {one.name} is {value!r}, of no use with {given}")


ROW_NUMBERS = IdRule()
"""The rule of a table that says none."""


def _check_choice(name: str, value: str, choices: tuple[str, ...], where: str) -> None:
    if value not in choices:
        raise StoreError(f"{where}: {name} is {value!r}, expected one of {', '.join(choices)}")


def _check_range(name: str, value: int, first: int, last: int, where: str) -> None:
    if not first <= value <= last:
        raise StoreError(f"{where}: {name} is {value}, expected {first} to {last}")
