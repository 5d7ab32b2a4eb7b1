"""GET /models/{model}/plan: ranks and shards of a served model."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field

from embedserve.api.dependencies import ModelsDep
from embedserve.model_info import ModelInfo
from embedserve_store.plans.plan import shard_bytes

router = APIRouter()


class Shard(BaseModel):
    """A block of a table on one rank, given by row and column offsets and counts."""

    rank: int
    row_offset: int
    row_count: int
    col_offset: int
    col_count: int
    bytes: int = Field(description="Bytes as stored.")


class TableShards(BaseModel):
    """The shards of a table."""

    name: str
    sharding: str
    shards: list[Shard]


class Plan(BaseModel):
    """The sharding plan: which rank holds which rows and columns."""

    model: str
    version: int
    device: str
    ranks: int
    tables: list[TableShards]


@router.get("/models/{model}/plan", summary="Get the sharding plan of a model", tags=["models"])
async def plan(model: str, models: ModelsDep) -> Plan:
    """Returns which rank holds which rows and columns of a served model's tables."""
    return plan_of(models.model(model))


def plan_of(info: ModelInfo) -> Plan:
    """Returns the shards that the server holds of ``info``'s tables, in the manifest's order."""
    return Plan(
        model=info.name,
        version=info.version,
        device=info.device_type,
        ranks=info.plan.world_size,
        tables=[
            TableShards(
                name=table.name,
                sharding=info.plan.tables[table.name].sharding_type,
                shards=[
                    Shard(**vars(shard), bytes=shard_bytes(shard, table))
                    for shard in info.plan.tables[table.name].served_shards
                ],
            )
            for table in info.tables
        ],
    )
