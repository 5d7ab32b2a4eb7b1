"""Policy of a router for the rows of a part that has no replica: an error or zeros, by table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

FAIL, ZEROS = "fail", "zeros"
TABLES_SHOWN_MAX = 20
"""Tables of a model that an error message names."""


@dataclass(frozen=True)
class MissingPolicy:
    """The parsed setting ``on_missing``.

    Attributes:
        default: FAIL or ZEROS, for tables without an entry of their own.
        by_table: FAIL or ZEROS, by the name of the table.
    """

    default: str = FAIL
    by_table: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, entries: Sequence[str]) -> Self:
        """Returns the policy of ``entries``, each ACTION for all tables or TABLE=ACTION.

        Raises:
            ValueError: an entry is neither, or two entries are about the same tables.
        """
        defaults: list[str] = []
        by_table: dict[str, str] = {}
        for entry in entries:
            table, equals, action = entry.rpartition("=")
            if action not in (FAIL, ZEROS) or (equals and not table):
                raise ValueError(
                    f"on_missing has {entry!r}, expected {FAIL}, {ZEROS}, TABLE={FAIL} or "
                    f"TABLE={ZEROS}"
                )
            if table in by_table:
                raise ValueError(f"on_missing names table {table!r} twice")
            if equals:
                by_table[table] = action
            else:
                defaults.append(action)
        if len(defaults) > 1:
            raise ValueError(f"on_missing has {len(defaults)} values for all tables, expected one")
        return cls(defaults[0] if defaults else FAIL, by_table)

    def fails(self, table: str) -> bool:
        """Returns whether requests fail that need rows of ``table`` on a part without a
        replica."""
        return self.by_table.get(table, self.default) == FAIL

    def check_tables(self, tables: Mapping[str, Iterable[str]]) -> None:
        """Raises ValueError if no model has one of the named tables.

        Args:
            tables: names of the tables of each model that is served.
        """
        known = {model: list(names) for model, names in tables.items()}
        for table in self.by_table:
            if not any(table in names for names in known.values()):
                there = [f"{model!r} has {_shown(names)}" for model, names in known.items()]
                raise ValueError(f"on_missing names table {table!r}, but {'; '.join(there)}")


def _shown(names: Sequence[str]) -> str:
    more = len(names) - TABLES_SHOWN_MAX
    return ", ".join(names[:TABLES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
