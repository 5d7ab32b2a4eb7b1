"""The sharding plan as stored: which rank holds which rows and columns of which table.

Plain values and versioned JSON of our own, so that plan.json outlives any torchrec release.
planner.py makes plans and turns them into torchrec's; this module never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embedserve_store.errors import StoreError
from embedserve_store.manifest import TableSpec

FORMAT_VERSION = 1
SHARDING_TYPES = ("table_wise", "row_wise")
"""What can be planned and served: shards of whole rows, one range of bytes in the file each.
Shards have columns in the format so that column_wise can come without another format."""


@dataclass(frozen=True)
class Shard:
    """A block of one table on one rank: rows and columns as [offset, offset + count)."""

    rank: int
    row_offset: int
    row_count: int
    col_offset: int
    col_count: int


@dataclass(frozen=True)
class TablePlan:
    sharding_type: str
    """One of SHARDING_TYPES."""
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Plan:
    """Where every table lies over ``world_size`` ranks, and what the publisher asked for."""

    world_size: int
    tables: Mapping[str, TablePlan]
    constraints: Mapping[str, tuple[str, ...]]
    """For each table the sharding types it may have when a host with another number of
    devices plans anew; a table that is not here may have any of SHARDING_TYPES."""

    def bytes_per_rank(self, tables: Sequence[TableSpec]) -> list[int]:
        """Stored bytes of ``tables`` that each rank holds; their sum is the tables' bytes."""
        result = [0] * self.world_size
        for table in tables:
            for shard in self.tables[table.name].shards:
                result[shard.rank] += shard.row_count * table.row_bytes
        return result

    def to_json(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "world_size": self.world_size,
            "tables": {
                name: {
                    "sharding_type": table.sharding_type,
                    "shards": [
                        {
                            "rank": shard.rank,
                            "rows": [shard.row_offset, shard.row_count],
                            "cols": [shard.col_offset, shard.col_count],
                        }
                        for shard in table.shards
                    ],
                }
                for name, table in self.tables.items()
            },
            "constraints": {
                name: {"sharding_types": list(types)} for name, types in self.constraints.items()
            },
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> Plan:
        """The plan in ``data`` (parsed JSON). ``where`` names the file in errors.

        Raises:
            StoreError: malformed, or of a format version that this code does not read.
        """
        if not isinstance(data, dict):
            raise StoreError(f"{where}: expected a JSON object")
        if data.get("format_version") != FORMAT_VERSION:
            raise StoreError(
                f"{where}: format_version is {data.get('format_version')!r}, "
                f"this embedserve reads format_version {FORMAT_VERSION}"
            )
        try:
            return cls(
                world_size=int(data["world_size"]),
                tables={
                    name: TablePlan(
                        sharding_type=table["sharding_type"],
                        shards=tuple(
                            Shard(int(s["rank"]), *map(int, s["rows"]), *map(int, s["cols"]))
                            for s in table["shards"]
                        ),
                    )
                    for name, table in data["tables"].items()
                },
                constraints={
                    name: tuple(constraint["sharding_types"])
                    for name, constraint in data.get("constraints", {}).items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise StoreError(f"{where}: not a sharding plan: {error!r}") from error

    def check(self, tables: tuple[TableSpec, ...], where: str) -> None:
        """Raises StoreError unless every table of the manifest is covered once and no other."""
        if self.world_size < 1:
            raise StoreError(f"{where}: world_size is {self.world_size}, expected 1 or more")
        names = {table.name for table in tables}
        for name in sorted(self.tables.keys() ^ names):
            problem = "is not in the plan" if name in names else "is not in the manifest"
            raise StoreError(f"{where}: table {name!r} {problem}")
        for table in tables:
            _check_table(self.tables[table.name], table, self.world_size, f"{where}: {table.name}")
        for name, types in self.constraints.items():
            if name not in names:
                raise StoreError(f"{where}: constraints: table {name!r} is not in the manifest")
            if not types or not set(types) <= set(SHARDING_TYPES):
                raise StoreError(
                    f"{where}: constraints: {name}: sharding_types is {list(types)}, "
                    f"this embedserve serves {' and '.join(SHARDING_TYPES)}"
                )


def _check_table(plan: TablePlan, table: TableSpec, world_size: int, where: str) -> None:
    if plan.sharding_type not in SHARDING_TYPES:
        raise StoreError(
            f"{where}: sharding_type is {plan.sharding_type!r}, "
            f"this embedserve serves {' and '.join(SHARDING_TYPES)}"
        )
    if not plan.shards:
        raise StoreError(f"{where}: no shards")
    if plan.sharding_type == "table_wise" and len(plan.shards) != 1:
        raise StoreError(f"{where}: {len(plan.shards)} shards, but table_wise has one")
    if plan.sharding_type == "row_wise" and len(plan.shards) != world_size:
        raise StoreError(
            f"{where}: {len(plan.shards)} shards, but row_wise has one for each of "
            f"{world_size} ranks"
        )
    for shard in plan.shards:
        if not 0 <= shard.rank < world_size:
            raise StoreError(f"{where}: rank is {shard.rank}, world_size is {world_size}")
    _check_cover(plan, table, where)


def _check_cover(plan: TablePlan, table: TableSpec, where: str) -> None:
    """Shards follow one another along the rows and have all columns."""
    row = 0
    for shard in plan.shards:
        columns = (shard.col_offset, shard.col_count)
        follows = shard.row_offset == row and shard.row_count >= 0
        if not follows or columns != (0, table.embedding_dim):
            raise StoreError(
                f"{where}: the shard on rank {shard.rank} has rows "
                f"[{shard.row_offset}, {shard.row_count}] and cols "
                f"[{shard.col_offset}, {shard.col_count}] (offset, count), which does not "
                f"follow the shards before it"
            )
        row += shard.row_count
    if row != table.num_embeddings:
        raise StoreError(f"{where}: shards cover {row} of {table.num_embeddings} rows")
