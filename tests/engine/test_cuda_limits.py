"""Tests, without a GPU, of the rows that FBGEMM's CUDA kernels can serve, and their results."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.conftest import SHARDING, Publish
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)
from half import rows_in_half
from pooled import collection
from reference import assert_same, stored_rows
from torchrec import PoolingType
from torchrec.modules.embedding_configs import data_type_to_sparse_type

from embedserve.engine.attach_weights import attach_weights
from embedserve.engine.compile import EAGER, Compiled
from embedserve.engine.cuda_limits import (
    COLUMNS_MAX,
    check_changed_rows,
    check_columns,
    check_half_range,
)
from embedserve.engine.engine import Engine
from embedserve.engine.sharded import shard_without_rows
from embedserve_store import (
    Manifest,
    ModelStore,
    ModelVersion,
    Plan,
    Shard,
    StoreError,
    TablePlan,
    TableSpec,
    publish,
)
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.table_spec import CODES_MAX, DTYPES
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.goldens.reference_pooling import pool
from embedserve_store.plans.plan import ROW_ALIGNMENT_BYTES, shard_bytes


class Kernel(IntNBitTableBatchedEmbeddingBagsCodegen):  # type: ignore[misc]
    """FBGEMM's kernel with rows padded as on a GPU, in this host's memory.

    Rows that are copied for a GPU are looked up on the CPU.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(
            [
                (
                    one.name,
                    one.local_rows,
                    one.local_cols,
                    data_type_to_sparse_type(one.data_type),
                    EmbeddingLocation.HOST,
                )
                for one in config.embedding_tables
            ],
            device="cpu",
            row_alignment=ROW_ALIGNMENT_BYTES["cuda"],
            output_dtype=SparseType.FP32,
        )

    def initialize_weights(self) -> None:
        super().initialize_weights()
        self.weights_dev = self.weights_host


class Sharded:
    """The part of a sharded module on GPUs that receives rows: kernels with their tables."""

    def __init__(self, version: ModelVersion) -> None:
        on_cpu = shard_without_rows(version, version.plan, "cpu", is_weighted=False).module
        self._configs = {Kernel(config): config for config in on_cpu.tbes_configs().values()}

    def tbes_configs(self) -> dict[Kernel, Any]:
        return self._configs


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_read_rows_padded_to_16_bytes(published: Publish, dtype: str) -> None:
    version = published(dtype=dtype, sharding=SHARDING, world_size=2)
    sharded = Sharded(version)
    attach_weights(sharded, version, "cuda")
    tables = stored_rows(version)
    found = 0
    for kernel, config in sharded.tbes_configs().items():
        most = max(one.local_rows for one in config.embedding_tables)
        ids: list[int] = []
        lengths: list[int] = []
        for one in config.embedding_tables:
            ids += range(one.local_rows)
            lengths += [1] * one.local_rows + [0] * (most - one.local_rows)
        offsets = np.cumsum([0, *lengths])
        values = kernel(torch.tensor(ids), torch.from_numpy(offsets)).numpy()
        for one in config.embedding_tables:
            row, column = one.local_metadata.shard_offsets
            rows = tables[one.name][row : row + one.local_rows, column : column + one.local_cols]
            table_values, values = np.split(values, [one.local_cols], axis=1)
            assert_same(table_values[: one.local_rows], rows)
            found += rows.size
    assert found == sum(table.size for table in tables.values())


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (0, 40_000, "row 37 has the scale 156.875 and the bias 0"),
        (60_000, 70_000, "row 37 has the scale 39.2188 and the bias 60000"),
    ],
)
def test_int8_row_that_overflows_float16_is_rejected_on_gpus(
    tmp_path: Path, low: float, high: float, message: str
) -> None:
    torch.manual_seed(3)
    source = collection(
        [
            ("user", 50, 32, ["user"], PoolingType.SUM),
            ("movie", 20, 16, ["movie"], PoolingType.SUM),
        ]
    )
    with torch.no_grad():
        source.embedding_bags["user"].weight[37] = torch.linspace(low, high, 32)
    result = publish(source, tmp_path, model="m", dtype="int8", sharding="row_wise", world_size=2)
    version = ModelStore(tmp_path).load("m", result.version)
    rows = rows_in_half(version.tables.rows("user"), "int8", 32)
    assert np.flatnonzero(~np.isfinite(rows).all(axis=1)).tolist() == [37]
    with pytest.raises(StoreError, match=f"table 'user': {message}"):
        attach_weights(Sharded(version), version, "cuda")


@pytest.mark.parametrize("dtype", CODES_MAX)
def test_scales_of_at_least_128_are_rejected(dtype: str) -> None:
    """Checks the limit of scales: 127.9375 is the float16 before 128."""
    table = TableSpec("t", 3, 4, ("f",), "sum", dtype)
    heads = np.array([[1, 0], [127.9375, -5], [128, 0]], "<f2").view(np.uint8)
    rows = np.hstack((heads, np.zeros((3, table.row_bytes - 4), np.uint8)))
    finite = np.isfinite(rows_in_half(rows, dtype, 4)).all(axis=1)
    assert finite.tolist() == [True, True, False]
    check_half_range(heads[:2], table, range(2))
    with pytest.raises(StoreError, match="table 't': row 102 has the scale 128 and the bias 0"):
        check_half_range(heads, table, range(100, 100 + len(heads)))


@pytest.mark.parametrize("dtype", CODES_MAX)
def test_delta_rows_that_overflow_float16_are_rejected(dtype: str) -> None:
    table = TableSpec("t", 30, 4, ("f",), "sum", dtype)
    values = np.zeros((2, table.row_bytes), np.uint8)
    check_changed_rows(ChangedRows(table, np.array([4, 17]), values))
    values[1, :4] = np.array([128, 0], "<f2").view(np.uint8)
    with pytest.raises(StoreError, match="table 't': row 17 has the scale 128 and the bias 0"):
        check_changed_rows(ChangedRows(table, np.array([4, 17]), values))


def test_float32_delta_rows_are_not_range_checked() -> None:
    table = TableSpec("t", 30, 4, ("f",), "sum", "float32")
    values = np.full((1, table.row_bytes), 0x58, np.uint8)
    check_changed_rows(ChangedRows(table, np.array([4]), values))


class CudaRoundingEngine(Engine):
    """An engine with the results of FBGEMM's CUDA kernels."""

    def each(self) -> list[Callable[..., np.ndarray]]:
        return [self.lookup]

    def lookup(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
        as_float16: bool = False,
    ) -> np.ndarray:
        def rows_of(table: TableSpec, numbers: np.ndarray) -> np.ndarray:
            rows = self._version.tables.rows(table.name)[numbers]
            return rows_in_half(rows, table.dtype, table.embedding_dim)

        bags = Bags(ids, lengths.reshape(len(self.manifest.features), -1), weights)
        return pool(self.manifest, bags, ids, rows_of)


@pytest.mark.parametrize("dtype", CODES_MAX)
def test_goldens_tolerate_float16_rounding_on_gpus_but_not_on_cpu(
    published: Publish, dtype: str
) -> None:
    def fail_if_called(ids: Any, lengths: Any, weights: Any) -> torch.Tensor:
        raise AssertionError("this engine answers itself")

    version = published(dtype=dtype)
    compiled = [[Compiled(fail_if_called, EAGER)] * 2]
    engine = CudaRoundingEngine(version, version.plan, "cuda", compiled)
    assert engine.waits_for_device
    engine.warm_up()
    engine.check()
    on_cpu = CudaRoundingEngine(version, version.plan, "cpu", compiled)
    assert not on_cpu.waits_for_device
    with pytest.raises(StoreError, match="are not the published ones"):
        on_cpu.warm_up()


@pytest.mark.parametrize(
    ("dtype", "row_bytes_max"),
    [("float32", 8192), ("float16", 8192), ("int8", 4096), ("int4", 2048)],
)
def test_tables_with_too_many_columns_for_cuda_kernels_are_rejected(
    dtype: str, row_bytes_max: int
) -> None:
    def one(*widths: int) -> tuple[Manifest, Plan]:
        """Returns a table and its plan, whole or divided by columns."""
        starts = np.cumsum((0, *widths)).tolist()
        shards = [Shard(0, 0, 10, start, end - start) for start, end in pairwise(starts)]
        kind = "table_wise" if len(widths) == 1 else "column_wise"
        table = TableSpec("wide", 10, starts[-1], ("f",), "sum", dtype)
        plan = Plan(1, {"wide": TablePlan(kind, tuple(shards))}, {})
        return Manifest("m", 1, (table,), is_weighted=False), plan

    most = COLUMNS_MAX[dtype]
    check_columns(*one(most))
    check_columns(*one(most, 4))
    for widths in ((most + 4,), (4, most + 1)):
        message = f"'wide' has {most + 4} columns on a GPU: .* serve {most} of {dtype} at most"
        with pytest.raises(StoreError, match=message):
            check_columns(*one(*widths))
    manifest, plan = one(most, most + 4)
    held = [shard_bytes(shard, manifest.tables[0], "cuda") for shard in plan.tables["wide"].shards]
    assert held[0] == 10 * row_bytes_max < held[1]
