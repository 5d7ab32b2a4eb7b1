"""Defines id rules: how each table turns a caller's id into a row number.

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
"""Maximum number of entries of a map, and maximum row in it; maps store both as uint32."""


@dataclass(frozen=True)
class IdRule:
    """Rule by which the ids of a table become row numbers.

    rows: an id is a row number. modulo: row = id mod modulus + offset, where mod is never
    negative, as in Python and torch.remainder. map: a stored vocabulary has the row of each id.
    """

    rule: str = "rows"
    modulus: int = 0
    """Divisor of the rule modulo, from 1 to the table's number of rows."""
    offset: int = 0
    """First row of the rule modulo."""
    id_type: str = "int64"
    """Id type of the rule map: int64, or string (UTF-8, stored as 64-bit hashes)."""
    entries: int = 0
    """Number of ids in the vocabulary of the rule map."""
    sha256: str = ""
    """Hexadecimal sha256 of the table's tensors in ids.safetensors, for the rule map."""
    examples: tuple[str, ...] = field(default=(), compare=False)
    """Some strings of the vocabulary, for the rule map with strings. Servers use them in example
    requests, because hashes cannot be converted back to strings."""
    unknown: str = "error"
    """Handling of an id that has no row, for the rules rows and map: error rejects the request,
    skip leaves the id out of its bag, row looks up default_row instead."""
    default_row: int = 0
    """Row that is looked up for unknown ids, if unknown is row."""

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that the rule uses, as JSON."""
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
        """Returns the rule in ``data`` (parsed JSON).

        Raises:
            StoreError: a key is unknown, missing or of a wrong type.
        """
        if not isinstance(data, Mapping):
            raise StoreError(f"{where}: expected a JSON object")
        rule = data.get("rule")
        if rule not in RULES:
            raise StoreError(f"{where}: rule is {rule!r}, expected one of {', '.join(RULES)}")
        if rule == "rows":
            data = {"unknown": "error"} | dict(data)  # format version 1 stores the rule only
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
        """Raises StoreError unless the rule is valid for a table of ``num_embeddings`` rows."""
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
            if type(value) is not kind:  # isinstance would accept a bool as an int
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
"""Default rule of a table: ids are row numbers, and unknown ids are errors."""


def _check_choice(name: str, value: str, choices: tuple[str, ...], where: str) -> None:
    if value not in choices:
        raise StoreError(f"{where}: {name} is {value!r}, expected one of {', '.join(choices)}")


def _check_range(name: str, value: int, first: int, last: int, where: str) -> None:
    if not first <= value <= last:
        raise StoreError(f"{where}: {name} is {value}, expected {first} to {last}")
