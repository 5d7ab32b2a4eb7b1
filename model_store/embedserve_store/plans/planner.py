"""Makes sharding plans with torchrec's EmbeddingShardingPlanner, and converts stored plans to it.

Planning uses a float description of the tables (a meta-device EmbeddingBagCollection). Shard sizes
are then logical rows and columns, independent of the stored dtype. A plan from the quantized module
would count padded bytes instead. Imports torchrec.
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

from embedserve_store.errors import InvalidModelError, checking_model
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.constraints import TableConstraints
from embedserve_store.plans.host_plan import with_hosts
from embedserve_store.plans.part_plan import check_parts_fit
from embedserve_store.plans.plan import Plan, Shard, TablePlan, shard_bytes
from embedserve_store.plans.planner_request import (
    Constraints,
    combined,
    own_constraints,
    to_torchrec_constraints,
)
from embedserve_store.plans.planner_search import RANK_MEMORY_BYTES, ShardCosts, search
from embedserve_store.plans.sharding_types import why_not

Sharding = str | Mapping[str, str] | Plan
"""Sharding type or "auto", for all tables or by table; or a whole plan."""


def make_plan(
    tables: Sequence[TableSpec],
    *,
    sharding: Sharding,
    world_size: int | None = None,
    device_type: str = "cpu",
    device_memory_bytes: int | None = None,
    constraints: Constraints | None = None,
    hosts: int | None = None,
    costs: ShardCosts | None = None,
    must_fit: bool = True,
) -> Plan:
    """Plans ``tables`` over ``world_size`` ranks with torchrec's EmbeddingShardingPlanner.

    Args:
        sharding: table_wise, row_wise, column_wise, data_parallel or auto, for all tables or by
            table. auto lets the planner choose (see sharding_types.auto_types), and is the default
            of tables that are not named. Or a Plan, which is checked and returned.
        world_size: number of ranks. Default: that of the Plan, or 1.
        device_type: cpu or cuda, which the planner's cost model assumes.
        device_memory_bytes: memory of each rank. Default: on cuda the memory of this host's GPUs,
            on cpu no limit.
        constraints: constraints by table; not allowed with a Plan, which has its own.
        hosts: number of hosts over which the tables are divided first, with ``world_size`` ranks on
            each. Default: that of the Plan, or 1.
        costs: costs of shards. Default: torchrec's cost model.
        must_fit: whether a plan that exceeds the memory is an error. False: the plan that exceeds
            it least is returned if none fits.

    Raises:
        InvalidModelError: a sharding, table or constraint is unknown or contradicts another. Or
            the planner found no plan, or the shards of a rank are larger than its memory.
    """
    check_table_names(tables)
    if isinstance(sharding, Plan):
        plan = _checked(sharding, tables, world_size, constraints)
    else:
        wanted = combined(tables, sharding, own_constraints(tables, constraints or {}))
        ranks = 1 if world_size is None else world_size
        memory_bytes = device_memory_bytes
        if hosts is not None and memory_bytes is not None:
            memory_bytes *= max(1, hosts)  # each host has about 1 / hosts of every shard
        plan = _search(tables, wanted, ranks, device_type, memory_bytes, costs)
    plan = with_hosts(plan, tables, hosts)
    if must_fit:
        memory = _memory(device_type, plan, device_memory_bytes)
        check_parts_fit(plan, tables, memory, device_type)
    return plan


def check_table_names(tables: Sequence[TableSpec]) -> None:
    """Raises InvalidModelError if torchrec cannot hold a table of that name.

    Its collections hold tables in a ModuleDict, whose keys have no dots and are not the names of
    its own attributes.
    """
    modules = torch.nn.ModuleDict()
    for table in tables:
        if "." in table.name or hasattr(modules, table.name):
            raise InvalidModelError(
                f"table {table.name!r}: torch's modules cannot hold a table of this name, because "
                "it has a dot or is an attribute of theirs: rename the table, also in the "
                "keys of a checkpoint"
            )


def _memory(device_type: str, plan: Plan, device_memory_bytes: int | None) -> list[int]:
    if device_memory_bytes is not None:
        return [device_memory_bytes] * plan.world_size
    if device_type != "cuda":
        return []
    gpus = range(torch.cuda.device_count())
    return [torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus]


def _checked(
    plan: Plan, tables: Sequence[TableSpec], world_size: int | None, constraints: Constraints | None
) -> Plan:
    if constraints:
        raise InvalidModelError("a plan has its own constraints: leave out one of the two")
    if world_size is not None and world_size != plan.world_size:
        raise InvalidModelError(
            f"world_size is {world_size}, but the plan is for {plan.world_size} ranks"
        )
    with checking_model():
        plan.check(tuple(tables), "plan")
    return plan


def _search(
    tables: Sequence[TableSpec],
    constraints: Mapping[str, TableConstraints],
    world_size: int,
    device_type: str,
    device_memory_bytes: int | None,
    costs: ShardCosts | None,
) -> Plan:
    """Returns the cheapest plan that fits, or else the plan whose fullest rank holds least.

    The caller checks whether the plan fits.
    """
    if world_size < 1:
        raise InvalidModelError(f"world_size is {world_size}, expected 1 or more")
    requested = {
        table.name: to_torchrec_constraints(
            constraints.get(table.name, TableConstraints()), table, world_size, device_type
        )
        for table in tables
    }
    # The planner has nothing to choose for a table that is whole on each rank.
    whole = ("data_parallel",) if world_size > 1 else ("table_wise", "row_wise", "data_parallel")
    shards = {
        table.name: _one_copy_each(table, types[0], world_size)
        for table in tables
        if len(types := requested[table.name].sharding_types) == 1 and types[0] in whole
    }
    plan = Plan(world_size, shards, dict(constraints))
    memory_bytes = min(_memory(device_type, plan, device_memory_bytes), default=RANK_MEMORY_BYTES)
    taken = max(plan.bytes_per_rank([t for t in tables if t.name in shards], device_type))
    divided = [table for table in tables if table.name not in shards]
    if divided:
        found = _divided(divided, requested, world_size, device_type, memory_bytes - taken, costs)
        shards |= {
            table.name: _table_plan(found[table.name], table, range(world_size))
            for table in divided
        }
    return replace(plan, tables={table.name: shards[table.name] for table in tables})


def _one_copy_each(table: TableSpec, sharding_type: str, world_size: int) -> TablePlan:
    shards = (
        Shard(rank, 0, table.num_embeddings, 0, table.embedding_dim) for rank in range(world_size)
    )
    return TablePlan(sharding_type, tuple(shards))


def _divided(
    tables: Sequence[TableSpec],
    requested: Mapping[str, ParameterConstraints],
    world_size: int,
    device_type: str,
    memory_bytes: int,
    costs: ShardCosts | None,
) -> EmbeddingModuleShardingPlan:
    def byte_costs(table: TableSpec, plan: TablePlan) -> list[float]:
        return [shard_bytes(shard, table, device_type) for shard in plan.shards]

    for limit_bytes, by in ((memory_bytes, costs), (RANK_MEMORY_BYTES, byte_costs)):
        try:
            return search(
                tables,
                {table.name: requested[table.name] for table in tables},
                world_size=world_size,
                device_type=device_type,
                memory_bytes=max(0, limit_bytes),
                costs=by,
            )
        except PlannerError as error:
            failure = error
    reason = " ".join(str(failure).split())
    raise InvalidModelError(f"no sharding plan, world_size is {world_size}: {reason}") from failure


def _table_plan(sharding: Any, table: TableSpec, ranks: Sequence[int]) -> TablePlan:
    """Converts torchrec's ``sharding`` of ``table``, which may count stored or unpadded columns.

    The rank of a shard is its index in ``ranks``.
    """
    shards = []
    for shard in sharding.sharding_spec.shards:
        (row, column), (rows, stored) = shard.shard_offsets, shard.shard_sizes
        columns = min(stored, table.embedding_dim - column)
        rank = ranks.index(shard.placement.rank())
        shards.append(Shard(rank, row, rows, column, columns))
    return TablePlan(sharding.sharding_type, tuple(shards))


def from_torchrec(
    sharding: Mapping[str, ParameterSharding], tables: Sequence[TableSpec], ranks: Sequence[int]
) -> Plan:
    """Converts the plan with which a model is trained over ``ranks``, which are numbered from 0 in
    the result.

    The plan's constraints are the sharding types, so a host with another number of devices makes a
    new plan with the same types.

    Raises:
        InvalidModelError: the sharding type of a table cannot be served.
    """
    kinds = {table.name: sharding[table.name].sharding_type for table in tables}
    shards = {}
    for table in tables:
        kind = kinds[table.name]
        if reason := why_not(kind, table):
            raise InvalidModelError(
                f"table {table.name!r}: {reason}: pass the sharding for serving, such as "
                "sharding='row_wise'"
            )
        is_copied = kind == "data_parallel"  # torchrec's plans have no shards for this type
        own = sharding[table.name]
        shards[table.name] = (
            _one_copy_each(table, kind, len(ranks)) if is_copied else _table_plan(own, table, ranks)
        )
    types = {name: TableConstraints(sharding_types=(kind,)) for name, kind in kinds.items()}
    return _checked(Plan(len(ranks), shards, types), tables, None, None)


def to_torchrec(plan: Plan, device_type: str) -> EmbeddingModuleShardingPlan:
    """Converts ``plan`` for DistributedModelParallel with the inference ("quant") kernel.

    A rank is a device index of ``device_type`` on this host; all CPU ranks are a single device.

    torchrec has no data_parallel for inference. Batches enter on rank 0, which looks up such a
    table whole, so copies on other ranks are neither made nor used. The result has table_wise for
    these tables. It also has table_wise for a column_wise or row_wise table with a single shard,
    because the lookup is then faster.
    """
    result = EmbeddingModuleShardingPlan()
    for name, stored in plan.tables.items():
        table = _as_served(stored)
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


def _as_served(table: TablePlan) -> TablePlan:
    if table.sharding_type == "data_parallel" or len(table.shards) == 1:
        return TablePlan("table_wise", table.served_shards)
    return table


def _device(device_type: str, rank: int) -> str:
    return "cpu" if device_type == "cpu" else f"{device_type}:{rank}"
