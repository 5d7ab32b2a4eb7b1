"""Configures torchrec's EmbeddingShardingPlanner for serving: its choices and its estimates.

The planner's own sharder, estimators and reservations are for training. They assume float rows with
gradients and optimizer state, and kernels that page between GPU and host. Here a shard needs its
stored bytes, the cost model is torchrec's for inference, and there is a single kernel. Imports
torchrec.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, SortBy
from torchrec.distributed.planner.proposers import (
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import Perf, ShardEstimator, ShardingOption, Storage
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.plan import Shard, TablePlan, shard_bytes
from embedserve_store.plans.sharding_types import SHARDING_TYPES

RANK_MEMORY_BYTES = 1 << 60
"""Memory per rank, in bytes, that the planner assumes without a limit; larger than any table."""
BATCH_SIZE = 512
"""Examples per batch in the cost model; 512 is torchrec's default."""
GRID_PROPOSALS_MAX = 1000
"""Maximum number of combinations for torchrec's grid search, whose default is 10,000. Above the
maximum the search is left to torchrec's greedy proposers."""

ShardCosts = Callable[[TableSpec, TablePlan], Sequence[float]]
"""Function that returns the cost of each shard of a table for the rank of the shard. In the plan
that it gets, shards are on ranks 0, 1, …. This is correct for row_wise shards; for other types the
cost does not depend on the rank."""


class _Sharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """torchrec's training sharder, restricted to the sharding types and the kernel of serving.

    row_wise is allowed on CPU too, and there is a single kernel.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(SHARDING_TYPES)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["quant"]


class _Enumerator(EmbeddingEnumerator):  # type: ignore[misc]
    """Enumerator that sorts the options by sharding type, so that plans are deterministic.

    torchrec enumerates options in the order of a set, which differs from run to run. The plan would
    differ with it whenever two options have equal costs.
    """

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        options: list[ShardingOption] = super().enumerate(module, sharders)
        return sorted(options, key=lambda option: SHARDING_TYPES.index(option.sharding_type))


class _StoredBytes(ShardEstimator):  # type: ignore[misc]
    """Estimator of shards: storage is the bytes on the device, and cost comes from ``costs``.

    Without ``costs`` it leaves the cost as it is.
    """

    def __init__(
        self, tables: Sequence[TableSpec], device_type: str, costs: ShardCosts | None
    ) -> None:
        self._tables = {table.name: table for table in tables}
        self._device_type = device_type
        self._costs = costs

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        for option in sharding_options:
            table = self._tables[option.name]
            own = _own_plan(option)
            for shard, described in zip(option.shards, own.shards, strict=True):
                nbytes = shard_bytes(described, table, self._device_type)
                on_gpu = self._device_type == "cuda"
                shard.storage = Storage(hbm=nbytes if on_gpu else 0, ddr=0 if on_gpu else nbytes)
            if self._costs is not None:
                for shard, cost in zip(option.shards, self._costs(table, own), strict=True):
                    shard.perf = Perf(cost, 0, 0, 0)


def _own_plan(option: ShardingOption) -> TablePlan:
    """Converts ``option`` to a TablePlan with its shards on ranks 0, 1, …."""
    shards = (
        Shard(rank, shard.offset[0], shard.size[0], shard.offset[1], shard.size[1])
        for rank, shard in enumerate(option.shards)
    )
    return TablePlan(option.sharding_type, tuple(shards))


def search(
    tables: Sequence[TableSpec],
    constraints: Mapping[str, ParameterConstraints],
    *,
    world_size: int,
    device_type: str,
    memory_bytes: int,
    costs: ShardCosts | None = None,
) -> EmbeddingModuleShardingPlan:
    """Returns the best plan that torchrec's planner finds.

    Args:
        memory_bytes: memory of each rank, which its shards must fit.
        costs: costs of shards; the best plan minimizes the cost of the most expensive rank.
            Default: torchrec's cost model of a lookup.

    Raises:
        PlannerError: the planner found no plan that fits.
    """
    memory = {"hbm_cap" if device_type == "cuda" else "ddr_cap": memory_bytes}
    with _quiet():
        topology = Topology(world_size=world_size, compute_device=device_type, **memory)
        estimators = [_StoredBytes(tables, device_type, costs)]
        if costs is None:
            estimators.insert(0, EmbeddingPerfEstimator(topology, constraints, is_inference=True))
        planner = EmbeddingShardingPlanner(
            topology=topology,
            enumerator=_Enumerator(
                topology=topology,
                batch_size=BATCH_SIZE,
                constraints=dict(constraints),
                estimator=estimators,
            ),
            # Tables are placed in descending order of the balanced quantity: cost or storage.
            partitioner=GreedyPerfPartitioner(SortBy.PERF if costs else SortBy.STORAGE),
            storage_reservation=FixedPercentageStorageReservation(0),
            proposer=[
                GridSearchProposer(GRID_PROPOSALS_MAX),
                GreedyProposer(),
                GreedyProposer(use_depth=False),
                UniformProposer(),
            ],
            constraints=dict(constraints),
            stats=[],
        )
        planned = planner.plan(_float_collection(tables), [_Sharder()])
    (module_plan,) = planned.plan.values()
    return cast(EmbeddingModuleShardingPlan, module_plan)


def _float_collection(tables: Sequence[TableSpec]) -> EmbeddingBagCollection:
    """Returns the tables as a float EmbeddingBagCollection on the meta device, with stored columns.

    Tables of an EmbeddingCollection are described so, too, since they are divided in the same ways.
    """
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.stored_dim,
                feature_names=list(table.feature_names),
                pooling=PoolingType.MEAN if table.pooling == "mean" else PoolingType.SUM,
            )
            for table in tables
        ],
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the planner's hints on training topologies and dense tensors.

    Neither exists when serving.
    """
    logger = logging.getLogger("torchrec.distributed.planner")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
