"""Makes sharding plans with torchrec's EmbeddingShardingPlanner, and gives stored plans back to it.

A plan is made from the float description of the tables (a meta-device EmbeddingBagCollection):
its shard sizes are then logical rows and columns, whatever dtype the rows are stored in.
A plan made from the quantized module would count padded bytes instead. Imports torchrec.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingType,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from embedserve_store.errors import InvalidModelError
from embedserve_store.manifest import TableSpec
from embedserve_store.plan import SHARDING_TYPES, Plan, Shard, TablePlan

RANK_MEMORY_BYTES = 1 << 60
"""What the planner is told of every rank: more than any table. It counts float rows and what
training adds to them, where the store may hold 4 bits a value and CPU ranks map one file."""


class _Sharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """torchrec offers no row_wise on CPU for training; for lookups it works."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        types = super().sharding_types(compute_device_type)
        return list({*types, ShardingType.ROW_WISE.value})


def float_collection(tables: Sequence[TableSpec]) -> EmbeddingBagCollection:
    """The tables as torchrec's float EmbeddingBagCollection, on the meta device."""
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=list(table.feature_names),
                pooling=PoolingType[table.pooling.upper()],
            )
            for table in tables
        ],
    )


def make_plan(
    tables: Sequence[TableSpec],
    *,
    sharding: str | Mapping[str, str],
    world_size: int,
    device_type: str = "cpu",
) -> Plan:
    """Plans ``tables`` over ``world_size`` ranks with torchrec's EmbeddingShardingPlanner.

    Args:
        sharding: table_wise or row_wise for all tables, or a mapping from table to one of them
            that names every table.
        device_type: cpu or cuda, what the planner's cost model assumes.

    Raises:
        InvalidModelError: an unknown sharding or table, or the planner found no plan.
    """
    wanted = _sharding_by_table(tables, sharding)
    return plan_under(
        tables,
        {name: (kind,) for name, kind in wanted.items()},
        world_size=world_size,
        device_type=device_type,
    )


def plan_under(
    tables: Sequence[TableSpec],
    constraints: Mapping[str, tuple[str, ...]],
    *,
    world_size: int,
    device_type: str = "cpu",
) -> Plan:
    """Plans ``tables`` under a stored plan's constraints, for another number of ranks.

    Raises:
        InvalidModelError: world_size is below 1, the planner found no plan, or, on cuda, a
            rank's part is larger than its GPU.
    """
    if world_size < 1:
        raise InvalidModelError(f"world_size is {world_size}, expected 1 or more")
    allowed = {table.name: constraints.get(table.name, SHARDING_TYPES) for table in tables}
    try:
        module_plan = _planned(tables, allowed, world_size, device_type)
    except PlannerError as error:
        reason = " ".join(str(error).split())
        raise InvalidModelError(
            f"no sharding plan, world_size is {world_size}: {reason}"
        ) from error
    plan = Plan(
        world_size=world_size,
        tables={table.name: _table_plan(module_plan[table.name]) for table in tables},
        constraints=dict(constraints),
    )
    if device_type == "cuda":
        check_gpu_memory(plan, tables)
    return plan


def _planned(
    tables: Sequence[TableSpec],
    allowed: Mapping[str, tuple[str, ...]],
    world_size: int,
    device_type: str,
) -> EmbeddingModuleShardingPlan:
    with _quiet():
        planner = EmbeddingShardingPlanner(
            topology=Topology(
                world_size=world_size,
                compute_device=device_type,
                hbm_cap=RANK_MEMORY_BYTES,
                ddr_cap=RANK_MEMORY_BYTES,
            ),
            constraints={
                name: ParameterConstraints(sharding_types=list(types))
                for name, types in allowed.items()
            },
        )
        planned = planner.plan(
            float_collection(tables), [cast(ModuleSharder[torch.nn.Module], _Sharder())]
        )
    (module_plan,) = planned.plan.values()
    return cast(EmbeddingModuleShardingPlan, module_plan)


def check_gpu_memory(plan: Plan, tables: Sequence[TableSpec]) -> None:
    """Raises InvalidModelError where the stored bytes of a rank are more than its GPU's memory.

    A rank whose GPU is not on this host is not checked.
    """
    gpus = torch.cuda.device_count()
    for rank, table_bytes in enumerate(plan.bytes_per_rank(tables)[:gpus]):
        memory_bytes = torch.cuda.get_device_properties(rank).total_memory
        if table_bytes > memory_bytes:
            raise InvalidModelError(
                f"rank {rank} would hold {table_bytes} bytes of tables, its GPU has "
                f"{memory_bytes}: use more GPUs, row_wise sharding or a smaller dtype"
            )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides the planner's hints on training topologies and dense tensors: neither is here."""
    logger = logging.getLogger("torchrec.distributed.planner")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _sharding_by_table(
    tables: Sequence[TableSpec], sharding: str | Mapping[str, str]
) -> dict[str, str]:
    names = [table.name for table in tables]
    if isinstance(sharding, str):
        sharding = dict.fromkeys(names, sharding)
    for name in sharding:
        if name not in names:
            raise InvalidModelError(f"sharding names table {name!r}, the model has {names}")
    for name in names:
        if name not in sharding:
            raise InvalidModelError(f"sharding does not say how table {name!r} is sharded")
        if sharding[name] not in SHARDING_TYPES:
            raise InvalidModelError(
                f"table {name!r}: sharding is {sharding[name]!r}, "
                f"expected one of {', '.join(SHARDING_TYPES)}"
            )
    return dict(sharding)


def _table_plan(sharding: Any) -> TablePlan:
    shards = [
        Shard(
            rank=shard.placement.rank(),
            row_offset=shard.shard_offsets[0],
            row_count=shard.shard_sizes[0],
            col_offset=shard.shard_offsets[1],
            col_count=shard.shard_sizes[1],
        )
        for shard in sharding.sharding_spec.shards
    ]
    return TablePlan(sharding.sharding_type, tuple(shards))


def to_torchrec(plan: Plan, device_type: str) -> EmbeddingModuleShardingPlan:
    """``plan`` as DistributedModelParallel takes it, for the inference ("quant") kernel.

    A rank is a device index of ``device_type`` on this host; all CPU ranks are one device.
    """
    result = EmbeddingModuleShardingPlan()
    for name, table in plan.tables.items():
        result[name] = ParameterSharding(
            sharding_type=table.sharding_type,
            compute_kernel="quant",
            ranks=[shard.rank for shard in table.shards],
            sharding_spec=EnumerableShardingSpec(
                [
                    ShardMetadata(
                        shard_offsets=[shard.row_offset, shard.col_offset],
                        shard_sizes=[shard.row_count, shard.col_count],
                        placement=f"rank:{shard.rank}/{_device(device_type, shard.rank)}",
                    )
                    for shard in table.shards
                ]
            ),
        )
    return result


def _device(device_type: str, rank: int) -> str:
    return "cpu" if device_type == "cpu" else f"{device_type}:{rank}"
