"""Divides the tables of a version into parts, one for each host of a model larger than a host.

A part has a contiguous range of the rows of each table, so that a host maps its part in place. The
sharding plan (plan.py) assigns the rows of a part to the ranks of its host. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.table_groups import table_groups
from embedserve_store.format.table_spec import TableSpec

if TYPE_CHECKING:
    from embedserve_store.plans.plan import Plan

SMALL_SHARE = 1 / 16
"""Fraction of a part's fair share of bytes below which tables stay whole. Dividing them would send
more requests without evening out the bytes."""
WHOLE_TYPES = frozenset({"table_wise", "data_parallel"})
"""Sharding types whose tables stay whole on a host, if their constraints allow no other type."""


@dataclass(frozen=True)
class HostPlan:
    """Rows of every table on each of ``parts`` parts."""

    parts: int
    rows: Mapping[str, tuple[int, ...]]
    """Boundaries of the parts by table: parts + 1 ascending row numbers, from 0 to num_embeddings.
    Part p has rows [boundaries[p], boundaries[p + 1]), which may be none."""

    def rows_on(self, table: str, part: int) -> range:
        """Returns the row numbers of ``table`` on part ``part``."""
        return range(self.rows[table][part], self.rows[table][part + 1])

    def bytes_per_part(self, tables: Sequence[TableSpec]) -> list[int]:
        """Returns the stored bytes of ``tables`` on each part."""
        return [
            sum(len(self.rows_on(table.name, part)) * table.row_bytes for table in tables)
            for part in range(self.parts)
        ]

    def rows_per_part(self) -> list[int]:
        """Returns the number of rows of all tables on each part."""
        return [
            sum(len(self.rows_on(name, part)) for name in self.rows) for part in range(self.parts)
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "parts": self.parts,
            "rows": {name: list(bounds) for name, bounds in self.rows.items()},
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> HostPlan:
        """Returns the host plan in ``data`` (parsed JSON).

        Raises:
            StoreError: a field is missing or has the wrong type.
        """
        if not isinstance(data, dict) or not isinstance(data.get("rows"), dict):
            raise StoreError(f"{where}: expected parts, and rows by table")
        parts = data.get("parts")
        if type(parts) is not int or parts < 1:
            raise StoreError(f"{where}: parts is {parts!r}, expected a number of 1 or more")
        for name, bounds in data["rows"].items():
            if not isinstance(bounds, list) or not all(type(one) is int for one in bounds):
                raise StoreError(f"{where}: rows of table {name!r} are {bounds!r:.80}")
        return cls(parts, {name: tuple(bounds) for name, bounds in data["rows"].items()})

    def check(self, tables: Sequence[TableSpec], where: str) -> None:
        """Raises StoreError unless the parts cover each of ``tables`` once.

        Tables that share features must have the same boundaries, as far as their rows reach, and
        each part must have a row.
        """
        names = {table.name for table in tables}
        for name in sorted(self.rows.keys() ^ names):
            problem = "is not in the host plan" if name in names else "is not in the manifest"
            raise StoreError(f"{where}: table {name!r} {problem}")
        for table in tables:
            self._check_table(table, where)
        for group in table_groups(tables):
            largest = max(group, key=lambda table: table.num_embeddings)
            for table in group:
                expected = _clipped(self.rows[largest.name], table)
                if (found := self.rows[table.name]) != expected:
                    raise StoreError(
                        f"{where}: table {table.name!r} has boundaries {list(found)}, expected "
                        f"{list(expected)}, because it shares features with {largest.name!r}"
                    )
        for part, count in enumerate(self.rows_per_part()):
            if not count:
                raise StoreError(f"{where}: part {part} of {self.parts} has no rows")

    def _check_table(self, table: TableSpec, where: str) -> None:
        bounds = self.rows[table.name]
        what = f"{where}: table {table.name!r} has boundaries {list(bounds)}, expected"
        if len(bounds) != self.parts + 1:
            raise StoreError(f"{what} {self.parts + 1} of them")
        if (bounds[0], bounds[-1]) != (0, table.num_embeddings):
            raise StoreError(f"{what} row numbers from 0 to {table.num_embeddings}")
        if any(first > last for first, last in pairwise(bounds)):
            raise StoreError(f"{what} ascending row numbers")


def plan_hosts(tables: Sequence[TableSpec], plan: Plan, parts: int) -> HostPlan:
    """Divides ``tables`` into ``parts`` parts of about the same number of bytes.

    A table is cut into even ranges of rows over all parts, or stays whole. It stays whole if the
    constraints of ``plan`` allow only WHOLE_TYPES, if it is small (SMALL_SHARE), or if it has fewer
    rows than there are parts. Whole tables go, the largest first, to the part on which their ranks
    have the fewest bytes, and of several such parts to the one with the fewest bytes. Tables that
    share features count as one table: they are cut alike, or are whole on one part.

    Raises:
        InvalidModelError: ``parts`` is below 1, or a part would have no rows.
    """
    if parts < 1:
        raise InvalidModelError(f"hosts is {parts}, expected 1 or more")
    small_bytes = SMALL_SHARE * sum(table.nbytes for table in tables) / parts
    whole: list[tuple[TableSpec, ...]] = []
    bounds: dict[str, tuple[int, ...]] = {}
    for group in table_groups(tables):
        if _stays_whole(group, plan, parts, small_bytes):
            whole.append(group)
            continue
        cuts = [_cut(group, part, parts) for part in range(parts + 1)]
        bounds |= {table.name: _clipped(cuts, table) for table in group}
    cut_tables = [table for table in tables if table.name in bounds]
    part_bytes = HostPlan(parts, bounds).bytes_per_part(cut_tables)
    rank_bytes = [[nbytes / plan.world_size] * plan.world_size for nbytes in part_bytes]
    for group in sorted(whole, key=group_bytes, reverse=True):
        added = plan.bytes_per_rank(group)
        after = [[a + b for a, b in zip(ranks, added, strict=True)] for ranks in rank_bytes]
        fullest = [max(a for a, b in zip(ranks, added, strict=True) if b) for ranks in after]
        _, _, part = min(zip(fullest, part_bytes, range(parts), strict=True))
        part_bytes[part] += group_bytes(group)
        rank_bytes[part] = after[part]
        cuts = [0 if one <= part else _row_count(group) for one in range(parts + 1)]
        bounds |= {table.name: _clipped(cuts, table) for table in group}
    if not min(part_bytes):
        raise InvalidModelError(
            f"hosts is {parts}, but part {part_bytes.index(0)} would have no rows: use fewer "
            "hosts, or let large tables be divided by rows (sharding auto or row_wise)"
        )
    return HostPlan(parts, {table.name: bounds[table.name] for table in tables})


def with_hosts(plan: Plan, tables: Sequence[TableSpec], hosts: int | None) -> Plan:
    """Returns ``plan`` with a host plan for ``hosts`` hosts.

    Args:
        hosts: number of hosts; 1 for no host plan, None to keep the plan's own.

    Raises:
        InvalidModelError: as in ``plan_hosts``.
    """
    if hosts is None:
        return plan
    return replace(plan, hosts=None if hosts == 1 else plan_hosts(tables, plan, hosts))


def _stays_whole(group: Sequence[TableSpec], plan: Plan, parts: int, small_bytes: float) -> bool:
    if _row_count(group) < parts or group_bytes(group) < small_bytes:
        return True
    constraints = (plan.constraints.get(table.name) for table in group)
    return any(
        one is not None and one.sharding_types and WHOLE_TYPES.issuperset(one.sharding_types)
        for one in constraints
    )


def _cut(group: Sequence[TableSpec], part: int, parts: int) -> int:
    """Returns the row before which ``part`` of ``parts`` of the bytes of ``group`` lie.

    Tables of a group with fewer rows add bytes to its first rows only.
    """
    left, start = group_bytes(group) * part // parts, 0
    for count in sorted({table.num_embeddings for table in group}):
        width = sum(table.row_bytes for table in group if table.num_embeddings >= count)
        if left <= (count - start) * width:
            return start + left // width
        left -= (count - start) * width
        start = count
    return start


def _row_count(group: Sequence[TableSpec]) -> int:
    return max(table.num_embeddings for table in group)


def group_bytes(group: Sequence[TableSpec]) -> int:
    """Returns the bytes of the rows of all tables of ``group``."""
    return sum(table.nbytes for table in group)


def _clipped(bounds: Sequence[int], table: TableSpec) -> tuple[int, ...]:
    return tuple(min(bound, table.num_embeddings) for bound in bounds)
