"""torchrec's EmbeddingShardingPlanner set up for serving: what it may choose, and what it counts.

Its own sharder, estimators and reservations are those of training: float rows with gradients
and optimizer state, kernels that page between GPU and host. Here a shard takes its stored
bytes, the cost model is torchrec's for inference, and one kernel serves. Imports torchrec.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
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
from embedserve_store.plans.plan import Shard, shard_bytes
from embedserve_store.plans.sharding_types import SHARDING_TYPES

RANK_MEMORY_BYTES = 1 << 60
"""What the planner is told where no memory is given: more than any table."""
BATCH_SIZE = 512
"""Examples a batch in the cost model, as torchrec assumes."""
GRID_PROPOSALS_MAX = 1000
"""A grid over more combinations is left to torchrec's greedy search, as it does above 10,000."""


class _Sharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """torchrec's sharder for training, which says how tables may be divided, with what serving
    can do: row_wise on CPU too, and one kernel."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(SHARDING_TYPES)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["quant"]


class _Enumerator(EmbeddingEnumerator):  # type: ignore[misc]
    """In an order of our own: torchrec's is that of a set, which differs from run to run, and
    with it the plan wherever two options cost the same."""

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        options: list[ShardingOption] = super().enumerate(module, sharders)
        return sorted(options, key=lambda option: SHARDING_TYPES.index(option.sharding_type))


class _StoredBytes(ShardEstimator):  # type: ignore[misc]
    """A shard takes what its rows take on the device; with ``as_cost`` that is its cost too."""

    def __init__(self, tables: Sequence[TableSpec], device_type: str, *, as_cost: bool) -> None:
        self._tables = {table.name: table for table in tables}
        self._device_type = device_type
        self._as_cost = as_cost

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        for option in sharding_options:
            table = self._tables[option.name]
            for shard in option.shards:
                rows, columns = shard.size
                held = shard_bytes(Shard(0, 0, rows, 0, columns), table, self._device_type)
                on_gpu = self._device_type == "cuda"
                shard.storage = Storage(hbm=held if on_gpu else 0, ddr=0 if on_gpu else held)
                if self._as_cost:
                    shard.perf = Perf(held, 0, 0, 0)


def search(
    tables: Sequence[TableSpec],
    constraints: Mapping[str, ParameterConstraints],
    *,
    world_size: int,
    device_type: str,
    memory_bytes: int,
    by_bytes: bool,
) -> EmbeddingModuleShardingPlan:
    """The best plan that torchrec finds.

    Args:
        memory_bytes: of every rank, which its shards must fit.
        by_bytes: the best is where the fullest rank holds least, not where the busiest has least
            to do.

    Raises:
        PlannerError: no plan was found that fits.
    """
    memory = {"hbm_cap" if device_type == "cuda" else "ddr_cap": memory_bytes}
    with _quiet():
        topology = Topology(world_size=world_size, compute_device=device_type, **memory)
        estimators = [_StoredBytes(tables, device_type, as_cost=by_bytes)]
        if not by_bytes:
            estimators.insert(0, EmbeddingPerfEstimator(topology, constraints, is_inference=True))
        planner = EmbeddingShardingPlanner(
            topology=topology,
            enumerator=_Enumerator(
                topology=topology,
                batch_size=BATCH_SIZE,
                constraints=dict(constraints),
                estimator=estimators,
            ),
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
    """The tables as torchrec's float EmbeddingBagCollection, on the meta device, as wide as stored.

    An EmbeddingCollection's tables stand in it too: they are divided in the same ways.
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
