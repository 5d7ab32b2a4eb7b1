"""The same answers from CUDA; skips itself where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from reference import assert_same, expected, sample, stored_rows, to_kjt

from embedserve.engine.restore import restore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4"])
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_cuda_equals_the_stored_rows(published, dtype, sharding) -> None:
    world_size = torch.cuda.device_count()
    version = published(dtype=dtype, sharding=sharding, world_size=world_size)
    tables = stored_rows(version)
    bags = sample(version)
    ids, lengths = to_kjt(bags, version.manifest.features)
    engine = restore(version, "cuda")
    assert_same(
        engine.lookup(ids, lengths), expected(tables, version.manifest, bags), relative=1e-5
    )
