"""Tests of lookups on CUDA: results equal the stored rows and the CPU's. Skipped without a GPU."""

from pathlib import Path

import pytest
import torch
from engine.conftest import Publish
from lookup_cases import CASES, RELATIVE, Case, check, check_most_rows
from reference import assert_same, check_concurrent_lookups, pooled, sample, stored_rows, to_kjt
from torchrec import KeyedJaggedTensor

from embedserve.engine.attach_weights import attach_weights
from embedserve.engine.cuda_limits import ROWS_MAX
from embedserve.engine.gpus import WORK_BYTES, find_gpus
from embedserve.engine.restore import restore
from embedserve.engine.sharded import shard_without_rows
from embedserve_store import Plan, Shard, TablePlan

several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second CUDA GPU")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda_lookups_equal_stored_rows(tmp_path: Path, case: Case) -> None:
    check(case, tmp_path, "cuda")


@several
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lookups_of_each_gpu_replica_equal_stored_rows(tmp_path: Path, case: Case) -> None:
    check(case, tmp_path, "cuda", gpu_layout="replicas")


def test_cuda_looks_up_ids_near_the_int32_maximum(tmp_path: Path) -> None:
    if find_gpus().free_bytes[0] < 16 * ROWS_MAX + WORK_BYTES:
        pytest.skip("its rows take 34 GB of a GPU")
    check_most_rows(tmp_path, "cuda")


@pytest.mark.parametrize(
    ("sharding", "gpu_layout"),
    [
        ("table_wise", "shards"),
        ("row_wise", "shards"),
        pytest.param("table_wise", "replicas", marks=several),
    ],
)
def test_concurrent_gpu_lookups_equal_sequential_lookups(
    published: Publish, sharding: str, gpu_layout: str
) -> None:
    version = published(sharding=sharding, world_size=torch.cuda.device_count())
    engine = restore(version, "cuda", gpu_layout=gpu_layout)
    features = version.manifest.features
    requests = [to_kjt(sample(version, size), features) for size in (1, 7, 100, 1000)]
    check_concurrent_lookups(engine.lookup, requests, 400)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4"])
def test_column_shards_on_one_gpu_equal_stored_columns(published: Publish, dtype: str) -> None:
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
    sharded = shard_without_rows(version, plan, "cuda", is_weighted=False)
    attach_weights(sharded.module, version, "cuda")
    bags = sample(version)
    ids, lengths = to_kjt(bags, version.manifest.features)
    features = list(version.manifest.features)
    with torch.inference_mode():
        result = sharded(
            KeyedJaggedTensor(
                keys=features,
                values=torch.from_numpy(ids).cuda(),
                lengths=torch.from_numpy(lengths).cuda(),
            )
        )
    tables = stored_rows(version, as_float16=True)
    for column in version.manifest.columns:
        feature = version.manifest.features[column.feature]
        values = result[column.key].cpu().numpy()
        assert_same(values, pooled(tables[column.table.name], bags[feature]), RELATIVE["cuda"])
