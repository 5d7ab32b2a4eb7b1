"""Makes sharding plans with torchrec's EmbeddingShardingPlanner, and gives stored plans back to it.

A plan is made from the float description of the tables (a meta-device EmbeddingBagCollection):
its shard sizes are then logical rows and columns, whatever dtype the rows are stored in.
A plan made from the quantized module would count padded bytes instead. Imports torchrec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.constraints import TableConstraints
from embedserve_store.plans.plan import Plan, Shard, TablePlan, check_fits, shard_bytes
from embedserve_store.plans.planner_request import (
    Constraints,
    combined,
    own_constraints,
    to_torchrec_constraints,
)
from embedserve_store.plans.planner_search import RANK_MEMORY_BYTES, ShardCosts, search
from embedserve_store.plans.sharding_types import why_not

__all__ = [
    "Constraints",
    "Sharding",
    "draft_plan",
    "from_torchrec",
    "make_plan",
    "plan_under",
    "to_torchrec",
]

Sharding = str | Mapping[str, str] | Plan
"""A sharding type or "auto" for all tables, by table, or a whole plan."""


def make_plan(
    tables: Sequence[TableSpec],
    *,
    sharding: Sharding,
    world_size: int | None = None,
    device_type: str = "cpu",
    device_memory_bytes: int | None = None,
    constraints: Constraints | None = None,
) -> Plan:
    """Plans ``tables`` over ``world_size`` ranks with torchrec's EmbeddingShardingPlanner.

    Args:
        sharding: for all tables or by table (one that is not named is "auto"): table_wise,
            row_wise, column_wise, data_parallel, or auto, the planner's choice (see
            sharding_types.auto_types). Or a Plan, which is checked and returned.
        world_size: None for 1, or the Plan's.
        device_type: cpu or cuda, what the planner's cost model assumes.
        device_memory_bytes: of every rank; None for no limit, but on cuda the memory of the
            GPUs that are on this host.
        constraints: by table; not together with a Plan, which has its own.

    Raises:
        InvalidModelError: an unknown sharding, table or constraint, or one that contradicts
            another; the planner found no plan; or a rank's part is larger than its memory.
    """
    plan = draft_plan(
        tables,
        sharding=sharding,
        world_size=world_size,
        device_type=device_type,
        device_memory_bytes=device_memory_bytes,
        constraints=constraints,
    )
    check_fits(plan, tables, _memory(device_type, plan, device_memory_bytes), device_type)
    return plan


def draft_plan(
    tables: Sequence[TableSpec],
    *,
    sharding: Sharding,
    world_size: int | None = None,
    device_type: str = "cpu",
    device_memory_bytes: int | None = None,
    constraints: Constraints | None = None,
    costs: ShardCosts | None = None,
) -> Plan:
    """As ``make_plan``, but where nothing fits the memory, the plan nearest to it; by ``costs``,
    if given, instead of torchrec's cost model."""
    if isinstance(sharding, Plan):
        return _checked(sharding, tables, world_size, constraints)
    wanted = combined(tables, sharding, own_constraints(tables, constraints or {}))
    ranks = 1 if world_size is None else world_size
    return _search(tables, wanted, ranks, device_type, device_memory_bytes, costs)


def plan_under(
    tables: Sequence[TableSpec],
    constraints: Mapping[str, TableConstraints],
    *,
    world_size: int,
    device_type: str = "cpu",
    device_memory_bytes: int | None = None,
) -> Plan:
    """Plans ``tables`` under a stored plan's constraints, for another number of ranks.

    Raises:
        InvalidModelError: world_size is below 1, the planner found no plan, or a rank's part
            is larger than its memory, as for ``make_plan``.
    """
    plan = _search(tables, constraints, world_size, device_type, device_memory_bytes)
    check_fits(plan, tables, _memory(device_type, plan, device_memory_bytes), device_type)
    return plan


def gpu_memory_bytes() -> list[int]:
    """Of each GPU of this host."""
    gpus = range(torch.cuda.device_count())
    return [torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus]


def _memory(device_type: str, plan: Plan, device_memory_bytes: int | None) -> list[int]:
    if device_memory_bytes is not None:
        return [device_memory_bytes] * plan.world_size
    return gpu_memory_bytes() if device_type == "cuda" else []


def _checked(
    plan: Plan,
    tables: Sequence[TableSpec],
    world_size: int | None,
    constraints: Constraints | None,
) -> Plan:
    if constraints:
        raise InvalidModelError("a plan has its own constraints: leave out one of the two")
    if world_size is not None and world_size != plan.world_size:
        raise InvalidModelError(
            f"world_size is {world_size}, but the plan is for {plan.world_size} ranks"
        )
    try:
        plan.check(tuple(tables), "plan")
    except StoreError as error:
        raise InvalidModelError(str(error)) from error
    return plan


def _search(
    tables: Sequence[TableSpec],
    constraints: Mapping[str, TableConstraints],
    world_size: int,
    device_type: str,
    device_memory_bytes: int | None,
    costs: ShardCosts | None = None,
) -> Plan:
    """The cheapest plan that fits, else the one whose fullest rank holds least: if that is too
    much, the caller says so."""
    if world_size < 1:
        raise InvalidModelError(f"world_size is {world_size}, expected 1 or more")
    asked = {
        table.name: to_torchrec_constraints(
            constraints.get(table.name, TableConstraints()), table, world_size, device_type
        )
        for table in tables
    }
    # A copy on every rank leaves nothing to choose.
    copied = {t.name for t in tables if asked[t.name].sharding_types == ["data_parallel"]}
    shards = {t.name: _one_copy_each(t, world_size) for t in tables if t.name in copied}
    plan = Plan(world_size, shards, dict(constraints))
    if device_memory_bytes is None:
        gpus = gpu_memory_bytes() if device_type == "cuda" else []
        device_memory_bytes = min(gpus, default=RANK_MEMORY_BYTES)
    taken = max(plan.bytes_per_rank([t for t in tables if t.name in copied], device_type))
    divided = [table for table in tables if table.name not in copied]
    if divided:
        room_bytes = device_memory_bytes - taken
        found = _divided(divided, asked, world_size, device_type, room_bytes, costs)
        shards |= {table.name: _table_plan(found[table.name], table) for table in divided}
    return replace(plan, tables={table.name: shards[table.name] for table in tables})


def _one_copy_each(table: TableSpec, world_size: int) -> TablePlan:
    shards = (
        Shard(rank, 0, table.num_embeddings, 0, table.embedding_dim) for rank in range(world_size)
    )
    return TablePlan("data_parallel", tuple(shards))


def _divided(
    tables: Sequence[TableSpec],
    asked: Mapping[str, ParameterConstraints],
    world_size: int,
    device_type: str,
    memory_bytes: int,
    costs: ShardCosts | None,
) -> EmbeddingModuleShardingPlan:
    def held(table: TableSpec, plan: TablePlan) -> list[float]:
        return [shard_bytes(shard, table, device_type) for shard in plan.shards]

    for limit_bytes, by in ((memory_bytes, costs), (RANK_MEMORY_BYTES, held)):
        try:
            return search(
                tables,
                {table.name: asked[table.name] for table in tables},
                world_size=world_size,
                device_type=device_type,
                memory_bytes=max(0, limit_bytes),
                costs=by,
            )
        except PlannerError as error:
            failure = error
    reason = " ".join(str(failure).split())
    raise InvalidModelError(f"no sharding plan, world_size is {world_size}: {reason}") from failure


def _table_plan(sharding: Any, table: TableSpec) -> TablePlan:
    """``sharding`` of the stored rows of ``table``, or of its own."""

    shards = []
    for shard in sharding.sharding_spec.shards:
        (row, column), (rows, stored) = shard.shard_offsets, shard.shard_sizes
        columns = min(stored, table.embedding_dim - column)
        shards.append(Shard(shard.placement.rank(), row, rows, column, columns))
    return TablePlan(sharding.sharding_type, tuple(shards))


def from_torchrec(
    sharding: Mapping[str, ParameterSharding], tables: Sequence[TableSpec], world_size: int
) -> Plan:
    """The plan by which a model is trained over ``world_size`` ranks; a host with another number
    plans anew with the same types.

    Raises:
        InvalidModelError: a table is sharded in a way that is not served.
    """
    kinds = {table.name: sharding[table.name].sharding_type for table in tables}
    shards = {}
    for table in tables:
        kind = kinds[table.name]
        if reason := why_not(kind, table):
            raise InvalidModelError(
                f"table {table.name!r}: {reason}: say what it is served by with sharding"
            )
        is_copied = kind == "data_parallel"  # torchrec's plans of it have no shards
        own = sharding[table.name]
        shards[table.name] = (
            _one_copy_each(table, world_size) if is_copied else _table_plan(own, table)
        )
    types = {name: TableConstraints(sharding_types=(kind,)) for name, kind in kinds.items()}
    return _checked(Plan(world_size, shards, types), tables, None, None)


def to_torchrec(plan: Plan, device_type: str) -> EmbeddingModuleShardingPlan:
    """``plan`` as DistributedModelParallel takes it, for the inference ("quant") kernel.

    A rank is a device index of ``device_type`` on this host; all CPU ranks are one device.
    torchrec has no data_parallel for inference: batches enter on rank 0, which looks such a
    table up whole, and the copies that a plan shows on other ranks are neither made nor asked.
    A column_wise or row_wise table of one shard is a whole table too, and looked up in less time.
    """
    result = EmbeddingModuleShardingPlan()
    for name, table in map(_as_served, plan.tables.items()):
        result[name] = ParameterSharding(
            sharding_type=table.sharding_type,
            compute_kernel="quant",
            ranks=[shard.rank for shard in table.shards],
            sharding_spec=EnumerableShardingSpec(
                [
                    ShardMetadata(
                        shard_offsets=[shard.row_offset, shard.col_offset],
                        shard_sizes=[shard.row_count, shard.stored_col_count],
                        placement=f"rank:{shard.rank}/{_device(device_type, shard.rank)}",
                    )
                    for shard in table.shards
                ]
            ),
        )
    return result


def _as_served(item: tuple[str, TablePlan]) -> tuple[str, TablePlan]:
    name, table = item
    if table.sharding_type == "data_parallel":
        on_rank_0 = tuple(shard for shard in table.shards if shard.rank == 0)
        return name, TablePlan("table_wise", on_rank_0)
    if table.sharding_type in ("column_wise", "row_wise") and len(table.shards) == 1:
        return name, TablePlan("table_wise", table.shards)
    return item


def _device(device_type: str, rank: int) -> str:
    return "cpu" if device_type == "cpu" else f"{device_type}:{rank}"
