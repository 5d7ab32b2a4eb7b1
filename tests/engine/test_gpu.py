"""The same answers from CUDA; skips itself where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference import assert_same, expected, pooled, sample, stored_rows, to_kjt
from torchrec import KeyedJaggedTensor

from embedserve.engine.restore import restore
from embedserve.engine.sharded import shard
from embedserve_store import ModelVersion, Plan, Shard, TablePlan

Publish = Callable[..., ModelVersion]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4"])
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise", "data_parallel"])
def test_cuda_equals_the_stored_rows(published: Publish, dtype: str, sharding: str) -> None:
    world_size = torch.cuda.device_count()
    version = published(dtype=dtype, sharding=sharding, world_size=world_size)
    tables = stored_rows(version)
    bags = sample(version)
    ids, lengths = to_kjt(bags, version.manifest.features)
    engine = restore(version, "cuda")
    assert_same(
        engine.lookup(ids, lengths), expected(tables, version.manifest, bags), relative=1e-5
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4"])
def test_column_shards_that_share_a_gpu(published: Publish, dtype: str) -> None:
    plan = Plan(
        1,
        {
            "movie": TablePlan("column_wise", (Shard(0, 0, 1001, 0, 4), Shard(0, 0, 1001, 4, 60))),
            "genre": TablePlan("column_wise", (Shard(0, 0, 3, 0, 12), Shard(0, 0, 3, 12, 4))),
            "user": TablePlan("table_wise", (Shard(0, 0, 50, 0, 32),)),
            "recent": TablePlan("data_parallel", (Shard(0, 0, 77, 0, 8),)),
        },
        {},
    )
    version = published(dtype=dtype, sharding=plan)
    sharded = shard(version, plan, "cuda", is_weighted=False)
    bags = sample(version)
    ids, lengths = to_kjt(bags, version.manifest.features)
    features = list(version.manifest.features)
    with torch.inference_mode():
        answer = sharded(
            KeyedJaggedTensor(
                keys=features,
                values=torch.from_numpy(ids).cuda(),
                lengths=torch.from_numpy(lengths).cuda(),
            )
        )
    tables = stored_rows(version)
    for column in version.manifest.columns:
        feature = version.manifest.features[column.feature]
        values = answer[column.key].cpu().numpy()
        assert_same(values, pooled(tables[column.table.name], bags[feature]), relative=1e-5)
