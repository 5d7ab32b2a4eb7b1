"""What FBGEMM's CUDA kernels make of rows: told without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from half import rows_in_half

from embedserve.engine.engine import Engine
from embedserve.engine.script import EAGER, Compiled
from embedserve_store import ModelVersion, StoreError, TableSpec
from embedserve_store.format.table_spec import CODES_MAX
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.goldens.hand_pooling import pool

Publish = Callable[..., ModelVersion]


class OnGpu(Engine):
    """An engine whose lookups answer as FBGEMM's CUDA kernels do."""

    def lookup(
        self, ids: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None = None
    ) -> np.ndarray:
        def rows_of(table: TableSpec, numbers: np.ndarray) -> np.ndarray:
            rows = self._version.tables.rows(table.name)[numbers]
            return rows_in_half(rows, table.dtype, table.embedding_dim)

        bags = Bags(ids, lengths.reshape(len(self.manifest.features), -1), weights)
        return pool(self.manifest, bags, ids, rows_of)


@pytest.mark.parametrize("dtype", CODES_MAX)
def test_an_engine_on_gpus_may_round_what_one_on_the_cpu_may_not(
    published: Publish, dtype: str
) -> None:
    def not_asked(ids: Any, lengths: Any, weights: Any) -> torch.Tensor:
        raise AssertionError("this engine answers itself")

    version = published(dtype=dtype)
    compiled = [Compiled(not_asked, EAGER)] * 2
    engine = OnGpu(version, version.plan, "cuda", compiled)
    engine.warm_up()
    engine.check()
    on_cpu = OnGpu(version, version.plan, "cpu", compiled)
    with pytest.raises(StoreError, match="are not the published ones"):
        on_cpu.warm_up()
