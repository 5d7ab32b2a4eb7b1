"""Trains small sharded models over gloo processes, and takes the rows that training touched.

    python tracked_training.py WORLD_SIZE OUT_FOLDER

Each rank writes ``rank-RANK.pt`` into OUT_FOLDER. For each run it has the tables before and after
each take (rank 0 only, whole), and the rows that this rank took.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import trainer
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from forked_ranks import run_ranks
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from embedserve_store.deltas.tracked_rows import TrackedRows
from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.publishing.ranks import Ranks

DTYPES = {"float32": DataType.FP32, "float16": DataType.FP16, "bfloat16": DataType.BF16}
TABLES: dict[str, tuple[int, int, list[str], str]] = {
    "user": (103, 16, ["user", "friend"], "row_wise"),
    "item": (77, 8, ["item"], "table_wise"),
    "tag": (51, 16, ["tag"], "column_wise"),
    "tiny": (7, 4, ["tiny"], "row_wise"),  # with three ranks the last has one row
    "country": (12, 4, ["country"], "data_parallel"),
}
"""Rows, columns, features and sharding."""
USER = {"user": TABLES["user"]}
RUNS = {
    "adagrad": (EmbOptimType.EXACT_ADAGRAD, "float32"),
    "rowwise adagrad": (EmbOptimType.EXACT_ROWWISE_ADAGRAD, "float16"),
}
STEPS = (3, 1, 2, 0, 0)
"""Number of training steps before each take."""


class Ranker(nn.Module):
    """Dense layers over ``tables``; returns loss and logits."""

    def __init__(self, dtype: str = "float32", tables: Any = None) -> None:
        super().__init__()
        tables = tables or TABLES
        configs = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=features,
                pooling=PoolingType.SUM,
                data_type=DTYPES[dtype],
            )
            for name, (rows, dim, features, _) in tables.items()
        ]
        self.ebc = EmbeddingBagCollection(tables=configs)
        self.over = nn.Linear(sum(dim * len(f) for _, dim, f, _ in tables.values()), 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits: torch.Tensor = self.over(self.ebc(features).values().float())
        return (logits - 1).square().mean(), logits


def ranker(
    optimizer: EmbOptimType = EmbOptimType.EXACT_ADAGRAD,
    dtype: str = "float32",
    tables: Any = None,
) -> DistributedModelParallel:
    tables = tables or TABLES
    sharding = {name: kind for name, (_, _, _, kind) in tables.items()}
    return trainer.shard_model(Ranker(dtype, tables), sharding, optimizer)


def batch(rng: np.random.Generator, tables: Any = None) -> KeyedJaggedTensor:
    """Returns two examples with 0 to 2 ids of each feature, so that a step leaves most rows
    unchanged."""
    tables = tables or TABLES
    rows = {f: rows for rows, _, features, _ in tables.values() for f in features}
    return trainer.sample(rng, 2, rows, ids_max=2)


def dense_optimizer(dmp: DistributedModelParallel) -> KeyedOptimizerWrapper:
    dense = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    return KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.05))


def stepper(dmp: DistributedModelParallel, seed: int = 0) -> Callable[..., None]:
    """Returns a function that trains one step, on the next batch or on the features that are
    passed."""
    rng, optimizer = np.random.default_rng(seed), dense_optimizer(dmp)

    def step(features: KeyedJaggedTensor | None = None) -> None:
        optimizer.zero_grad()
        loss, _ = dmp(batch(rng) if features is None else features)
        loss.backward()
        optimizer.step()

    return step


def gathered(dmp: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Returns every table by name, whole, on rank 0; bfloat16 as float32."""
    whole = trainer.gathered(dmp, dist.get_rank())
    return {
        key.split(".")[-2]: (table.float() if table.dtype == torch.bfloat16 else table).clone()
        for key, table in whole.items()
    }


def take_rows(tracked: TrackedRows) -> Any:
    """Takes the touched rows, which then count as taken."""
    return tracked.whole_rows(tracked.take())


def run(dmp: DistributedModelParallel, tracked: TrackedRows) -> list[Any]:
    step = stepper(dmp, dist.get_rank())
    found: list[Any] = [gathered(dmp)]
    for steps in STEPS:
        for _ in range(steps):
            step()
        found += [take_rows(tracked), gathered(dmp)]
    return found


def record(dmp: DistributedModelParallel, table: str, ids: list[int]) -> None:
    """Makes TorchRec's tracker record ``ids`` of this rank's shard, as a lookup would."""
    tracker = dmp.get_delta_tracker()
    fqn = tracker.table_to_fqn[table]
    tracker.store.append(tracker.curr_batch_idx, fqn, torch.tensor(ids))


def rows_of_an_invalid_id(dmp: DistributedModelParallel) -> list[int]:
    """Returns the rows of "user" that this rank takes after rank 1 recorded an id outside the
    table."""
    tracked = TrackedRows(dmp, Ranks())
    if dist.get_rank() == 1:
        record(dmp, "user", [52])
    taken = take_rows(tracked)
    tracked.close()
    return taken["user"][0].tolist() if "user" in taken else []


def take_after_failure(dmp: DistributedModelParallel) -> tuple[str, Any]:
    """Returns the error of a take that fails on rank 1 alone, and the rows of the next take."""
    tracked = TrackedRows(dmp, Ranks())
    step = stepper(dmp, dist.get_rank())
    step()
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(tracked._ids, "read", raise_out_of_memory)
        taken = tracked.take()
    with pytest.raises(StoreError) as caught:
        tracked.whole_rows(taken)
    tracked.take_again(taken.numbers)
    again = take_rows(tracked)
    tracked.close()
    return str(caught.value), again


def raise_out_of_memory(*_: object) -> None:
    raise RuntimeError("out of memory")


def column_wise_error(dmp: DistributedModelParallel) -> str:
    """Returns the error of a take after rank 1 alone recorded an id of a column-wise table."""
    tracked = TrackedRows(dmp, Ranks())
    if dist.get_rank() == 1:
        record(dmp, "tag", [7])
    try:
        with pytest.raises(InvalidModelError) as caught:
            take_rows(tracked)
    finally:
        tracked.close()
    return str(caught.value)


def main(rank: int, out: Path) -> None:
    found: dict[str, Any] = {}
    for name, (optimizer, dtype) in RUNS.items():
        dmp = ranker(optimizer, dtype)
        tracked = TrackedRows(dmp, Ranks())
        found[name] = run(dmp, tracked)
    tracked.close()
    found["rows of an invalid id"] = rows_of_an_invalid_id(dmp)
    found["column-wise error"] = column_wise_error(dmp)
    found["before"] = gathered(dmp)
    found["error"], found["again"] = take_after_failure(dmp)
    found["after"] = gathered(dmp)
    torch.save(found, out / f"rank-{rank}.pt")
    dist.barrier()


if __name__ == "__main__":
    run_ranks(int(sys.argv[1]), main, Path(sys.argv[2]))
