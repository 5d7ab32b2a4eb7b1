"""Defines the stored sharding plan: the rows and columns of each table that each rank holds.

A plan is plain values in versioned JSON, so that plan.json does not depend on a torchrec release.
planner.py makes plans and converts them to torchrec's. Never imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from embedserve_store.errors import InvalidModelError, StoreError, reading
from embedserve_store.format.json_fields import parse_json
from embedserve_store.format.table_spec import COLUMN_MULTIPLE, TableSpec, row_bytes, stored_columns
from embedserve_store.plans.constraints import TableConstraints
from embedserve_store.plans.host_plan import HostPlan
from embedserve_store.plans.sharding_types import why_not

FORMAT_VERSION = 1
PLAN_BYTES_MAX = 64 << 20
ROW_ALIGNMENT_BYTES = {"cpu": 1, "cuda": 16}
"""Bytes to whose multiples rows are padded in memory, by device type. FBGEMM's CUDA kernels load 16
bytes at a time."""


@dataclass(frozen=True)
class Shard:
    """Block of a table on a rank: rows and columns [offset, offset + count)."""

    rank: int
    row_offset: int
    row_count: int
    col_offset: int
    col_count: int
    """Number of the model's columns. The shard with the last column also has the padding columns of
    the stored rows."""

    @property
    def stored_col_count(self) -> int:
        """Returns the number of columns of the stored rows that the shard has, with padding."""
        return stored_columns(self.col_count)


@dataclass(frozen=True)
class TablePlan:
    sharding_type: str
    """Sharding type, a member of sharding_types.SHARDING_TYPES."""
    shards: tuple[Shard, ...]

    @property
    def served_shards(self) -> tuple[Shard, ...]:
        """Returns the shards that a server holds.

        Batches enter on rank 0, so only the copy of a data_parallel table on rank 0 is looked up.
        """
        if self.sharding_type == "data_parallel":
            return tuple(shard for shard in self.shards if not shard.rank)
        return self.shards


@dataclass(frozen=True)
class Plan:
    """Location of every table on ``world_size`` ranks, and the publisher's constraints."""

    world_size: int
    tables: Mapping[str, TablePlan]
    constraints: Mapping[str, TableConstraints]
    """Constraints under which a host with another number of devices makes a new plan. Tables
    without constraints are left to the planner."""
    hosts: HostPlan | None = None
    """Rows of each host, for a model that is served by several; None for one host."""

    def bytes_per_rank(self, tables: Sequence[TableSpec], device_type: str = "cpu") -> list[int]:
        """Returns the bytes of ``tables`` on each rank: stored bytes on cpu, padded rows on cuda.

        A data_parallel table counts on every rank. Each column shard of an int8 or int4 table has
        its own scale and bias for each row.
        """
        result = [0] * self.world_size
        for table in tables:
            for shard in self.tables[table.name].shards:
                result[shard.rank] += shard_bytes(shard, table, device_type)
        return result

    def served_bytes_per_rank(
        self, tables: Sequence[TableSpec], device_type: str = "cpu"
    ) -> list[int]:
        """Returns the bytes of ``tables`` that a server holds on each rank (served_shards)."""
        served = {name: replace(one, shards=one.served_shards) for name, one in self.tables.items()}
        return replace(self, tables=served).bytes_per_rank(tables, device_type)

    def column_shard_bytes(self, tables: Sequence[TableSpec]) -> int:
        """Returns the stored bytes of shards that have only some of their table's columns.

        Such a shard is not a range of the file, so it is copied even if other shards are mapped.
        """
        return sum(
            shard_bytes(shard, table)
            for table in tables
            for shard in self.tables[table.name].shards
            if shard.col_count < table.embedding_dim
        )

    def with_whole_rows(self, groups: Sequence[Sequence[TableSpec]]) -> Plan:
        """Returns this plan with each row on one rank, and with groups that are sharded alike.

        The ranks of a row are then the same in all tables of a group: the tables are row_wise with
        the same rows on each rank, or whole. Each rank of a row_wise table has as many rows as the
        first, as far as there are rows. column_wise tables become whole. So do row_wise tables
        whose ranks have other rows, or whose group is not sharded alike. A whole table is on the
        rank of its first shard. A plan that is made for another number of ranks has these
        properties, too.

        Args:
            groups: groups of tables, with each table in one group.
        """
        tables, constraints = dict(self.tables), dict(self.constraints)
        for group in groups:
            is_kept = self._are_row_wise_alike(group)
            for table in group:
                if not is_kept:
                    tables[table.name] = _whole(self.tables[table.name], table)
                constraint = constraints.get(table.name, TableConstraints())
                types = (self.tables[table.name].sharding_type, *(constraint.sharding_types or ()))
                if len(group) > 1 or "column_wise" in types:
                    constraints[table.name] = replace(
                        constraint,
                        sharding_types=(tables[table.name].sharding_type,),
                        min_partition=None,
                    )
        return replace(self, tables=tables, constraints=constraints)

    def _are_row_wise_alike(self, group: Sequence[TableSpec]) -> bool:
        """Returns whether all tables of ``group`` are row_wise, with the same rows on each rank: as
        many as on the first, as far as there are rows."""
        plans = [self.tables[table.name] for table in group]
        if {plan.sharding_type for plan in plans} != {"row_wise"}:
            return False
        first, rows = plans[0].shards[0].row_count, group[0].num_embeddings
        even = [min((rank + 1) * first, rows) for rank in range(self.world_size)]
        return all(
            [shard.row_offset + shard.row_count for shard in plan.shards] == even for plan in plans
        )

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
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
                name: constraint.to_json() for name, constraint in self.constraints.items()
            },
        }
        if self.hosts is not None:
            data["hosts"] = self.hosts.to_json()
        return data

    @classmethod
    def from_json(cls, data: Any, where: str) -> Plan:
        """Returns the plan in ``data`` (parsed JSON).

        Raises:
            StoreError: the plan is malformed, or this code does not read its format version.
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
                    name: TableConstraints.from_json(value, f"{where}: constraints: {name}")
                    for name, value in data.get("constraints", {}).items()
                },
                hosts=HostPlan.from_json(data["hosts"], f"{where}: hosts")
                if "hosts" in data
                else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise StoreError(f"{where}: not a sharding plan: {error!r}") from error

    def check(self, tables: tuple[TableSpec, ...], where: str) -> None:
        """Raises StoreError unless the plan is valid for ``tables``, the tables of the manifest.

        The plan must have exactly these tables, and shards must cover each table once (a
        data_parallel table once per rank). Ranks, constraints and a host plan must be valid.
        """
        if self.world_size < 1:
            raise StoreError(f"{where}: world_size is {self.world_size}, expected 1 or more")
        names = {table.name for table in tables}
        for name in sorted(self.tables.keys() ^ names):
            problem = "is not in the plan" if name in names else "is not in the manifest"
            raise StoreError(f"{where}: table {name!r} {problem}")
        for table in tables:
            _check_table(self.tables[table.name], table, self.world_size, f"{where}: {table.name}")
        by_name = {table.name: table for table in tables}
        for name, constraint in self.constraints.items():
            if name not in names:
                raise StoreError(f"{where}: constraints: table {name!r} is not in the manifest")
            constraint.check(by_name[name], f"{where}: constraints: {name}")
        if self.hosts is not None:
            self.hosts.check(tables, f"{where}: hosts")


def shard_bytes(shard: Shard, table: TableSpec, device_type: str = "cpu") -> int:
    """Returns the bytes of ``shard`` of ``table`` on a device: stored bytes on cpu."""
    return shard.row_count * row_pitch(row_bytes(table.dtype, shard.stored_col_count), device_type)


def row_pitch(nbytes: int, device_type: str) -> int:
    """Returns the bytes from one row of ``nbytes`` to the next on a device."""
    alignment = ROW_ALIGNMENT_BYTES[device_type]
    return -(-nbytes // alignment) * alignment


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan.json from a store, or written by hand. Plan.check compares it with tables.

    Raises:
        StoreError: the file cannot be read, is not a plan, or has another format version.
    """
    with reading(path), open(path, "rb") as file:
        text = file.read(PLAN_BYTES_MAX + 1)
    if len(text) > PLAN_BYTES_MAX:
        raise StoreError(f"{path}: over {PLAN_BYTES_MAX} bytes, not a plan")
    return Plan.from_json(parse_json(text, str(path)), str(path))


def check_fits(
    plan: Plan, tables: Sequence[TableSpec], memory_bytes: Sequence[int], device_type: str
) -> None:
    """Raises InvalidModelError if a rank's tables are larger than its memory.

    Args:
        memory_bytes: memory of rank 0, 1, …; ranks beyond the list are not checked.
    """
    for rank, (needed, has) in enumerate(
        zip(plan.bytes_per_rank(tables, device_type), memory_bytes, strict=False)
    ):
        if needed > has:
            raise InvalidModelError(
                f"rank {rank} would hold {needed:,} bytes of tables, it has {has:,}: use more "
                "ranks, row_wise sharding for the largest tables or a smaller dtype"
            )


def _whole(plan: TablePlan, table: TableSpec) -> TablePlan:
    """Returns ``plan``, or if it divides ``table`` the whole table on the rank of the first
    shard."""
    if plan.sharding_type in ("table_wise", "data_parallel"):
        return plan
    shard = Shard(plan.shards[0].rank, 0, table.num_embeddings, 0, table.embedding_dim)
    return TablePlan("table_wise", (shard,))


def _check_table(plan: TablePlan, table: TableSpec, world_size: int, where: str) -> None:
    if reason := why_not(plan.sharding_type, table):
        raise StoreError(f"{where}: {reason}")
    shards = len(plan.shards)
    expected = {"table_wise": 1, "row_wise": world_size, "data_parallel": world_size}
    if shards != expected.get(plan.sharding_type, max(1, shards)):
        raise StoreError(
            f"{where}: {plan.sharding_type} over {world_size} ranks has "
            f"{expected.get(plan.sharding_type, 'some')} shards, the plan {shards}"
        )
    for shard in plan.shards:
        if not 0 <= shard.rank < world_size:
            raise StoreError(f"{where}: rank is {shard.rank}, world_size is {world_size}")
    ranks = [shard.rank for shard in plan.shards]
    if plan.sharding_type in ("row_wise", "data_parallel") and ranks != list(range(world_size)):
        raise StoreError(
            f"{where}: ranks are {ranks}, but {plan.sharding_type} shards lie on 0, 1, … in order"
        )
    if plan.sharding_type == "data_parallel":
        for shard in plan.shards:
            _check_cover((shard,), table, where)
    elif plan.sharding_type == "column_wise":
        _check_column_cover(plan.shards, table, where)
    else:
        _check_cover(plan.shards, table, where)


def _check_cover(shards: Sequence[Shard], table: TableSpec, where: str) -> None:
    """Raises StoreError unless the shards are contiguous along the rows and have all columns."""
    row = 0
    for shard in shards:
        columns = (shard.col_offset, shard.col_count)
        if shard.row_offset != row or shard.row_count < 0 or columns != (0, table.embedding_dim):
            raise StoreError(f"{where}: {_described(shard)} does not follow the shards before it")
        row += shard.row_count
    if row != table.num_embeddings:
        raise StoreError(f"{where}: shards cover {row} of {table.num_embeddings} rows")


def _check_column_cover(shards: Sequence[Shard], table: TableSpec, where: str) -> None:
    """Raises StoreError unless the shards are contiguous along the columns and have all rows.

    Every shard but the last must have a multiple of COLUMN_MULTIPLE columns.
    """
    column = 0
    for shard in shards:
        rows = (shard.row_offset, shard.row_count)
        if shard.col_offset != column or shard.col_count < 1 or rows != (0, table.num_embeddings):
            raise StoreError(f"{where}: {_described(shard)} does not follow the shards before it")
        column += shard.col_count
        if shard.col_count % COLUMN_MULTIPLE and column != table.embedding_dim:
            raise StoreError(
                f"{where}: {_described(shard)} is not of a multiple of {COLUMN_MULTIPLE} columns, "
                "as FBGEMM's kernels take"
            )
    if column != table.embedding_dim:
        raise StoreError(f"{where}: shards cover {column} of {table.embedding_dim} columns")


def _described(shard: Shard) -> str:
    return (
        f"the shard on rank {shard.rank}, rows [{shard.row_offset}, {shard.row_count}] and "
        f"cols [{shard.col_offset}, {shard.col_count}] (offset, count),"
    )
