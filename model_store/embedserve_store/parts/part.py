"""Names the part of a version that a process holds. Never imports torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from embedserve_store.errors import NoSuchPartError
from embedserve_store.plans.plan import Plan

PART_PATTERN = re.compile(r"(0|[1-9][0-9]*)/([1-9][0-9]*)")


@dataclass(frozen=True)
class Part:
    """Part ``number``, from 0 on, of a version that is divided into ``count`` parts."""

    number: int
    count: int

    def __post_init__(self) -> None:
        """Raises ValueError unless the number is below the count."""
        if not 0 <= self.number < self.count:
            raise ValueError(f"part is {self}, expected a number from 0 to {self.count - 1}")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Part:
        """Returns the part that ``text`` names; raises ValueError if it names none.

        >>> Part.parse("3/8")
        Part(number=3, count=8)
        """
        found = PART_PATTERN.fullmatch(text)
        if found is None:
            raise ValueError(f"part is {text!r}, expected NUMBER/COUNT, such as 0/8 or 7/8")
        return cls(int(found[1]), int(found[2]))

    @property
    def cache_suffix(self) -> str:
        """Suffix of the folder in the cache that has this part of the versions of a store."""
        return f"-part-{self.number}-of-{self.count}"


@dataclass(frozen=True)
class LocalTables:
    """Selects what a router holds: the smallest of the tables that are whole on one part, up to
    ``bytes_max`` bytes in all, and the vocabularies."""

    bytes_max: int

    @property
    def cache_suffix(self) -> str:
        """Suffix of the folder in the cache that has these tables of the versions of a store."""
        return f"-tables-of-{self.bytes_max}-bytes" if self.bytes_max else "-no-rows"


NO_ROWS = LocalTables(0)
RowSelection = Part | LocalTables | None
"""Selection of the rows that a process holds; None for all rows."""


def check_selection(plan: Plan, selection: Part | LocalTables, where: str) -> None:
    """Raises NoSuchPartError unless a version with ``plan`` has the parts that ``selection``
    selects from."""
    if plan.hosts is None:
        raise NoSuchPartError(
            f"{where}: was published without --hosts, so it has no parts: publish it with --hosts"
        )
    if isinstance(selection, Part) and selection.count != plan.hosts.parts:
        raise NoSuchPartError(
            f"{where}: part {selection} was requested, but the version has {plan.hosts.parts} parts"
        )
