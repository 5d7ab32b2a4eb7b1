"""Bandwidth of FBGEMM's kernel alone on one device, for every dtype, with a table beyond all
caches.

All rows are identical and have 256 bytes, so that the correct sums are known. The rate is compared
with a copy on the same device. bench/gpu_check.py runs this module.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen as Kernel,
)
from torchrec.modules.embedding_configs import data_type_to_sparse_type

from embedserve.engine.sharded import DATA_TYPES
from embedserve_store.format.row_layout import dequantize_rows
from embedserve_store.plans.plan import ROW_ALIGNMENT_BYTES

ROW_BYTES = 256
COLUMNS = {"float32": 64, "float16": 128, "int8": 252, "int4": 504}
"""Columns of a row of ROW_BYTES bytes, including its scale and bias, by dtype."""
BAG_IDS = 32
ROW_BYTE = 1
"""Value of every byte of the table. It avoids subnormal float32 numbers, which are slow on CPUs."""
SCATTER = 2_654_435_761
"""An odd factor: multiplying ids by it modulo a power of two permutes them."""


@dataclass(frozen=True)
class Size:
    """Size of a measurement.

    Attributes:
        rows: rows of the table; a power of two.
        bags: bags of 32 ids each.
    """

    rows: int
    bags: int
    rounds: int = 5

    @property
    def table_bytes(self) -> int:
        return self.rows * ROW_BYTES

    @property
    def gathered_bytes(self) -> int:
        return self.bags * BAG_IDS * ROW_BYTES


WHOLE = Size(rows=1 << 23, bags=1 << 17)
"""Full size: a table of 2 GiB, and 1 GiB of rows gathered from it."""
QUICK = Size(rows=1 << 10, bags=1 << 5, rounds=1)


def gathered(device: torch.device, size: Size) -> Iterator[tuple[str, str]]:
    """Yields (measurement, result) for each dtype and distribution of ids.

    Raises:
        AssertionError: a sum is wrong.
    """
    copied = 2 * size.gathered_bytes / _copy_seconds(device, size)
    yield "a copy on the device, read and written", f"{copied / 1e9:.1f} GB/s"
    for dtype in COLUMNS:
        kernel = _kernel(dtype, device, size.rows)
        for name, ids in _ids(size).items():
            seconds = _seconds(kernel, dtype, ids.to(device), size)
            rate = size.gathered_bytes / seconds
            found = f"{rate / 1e9:.1f} GB/s gathered, {rate / copied:.2f} of the copy"
            yield f"{dtype}, {name} ids", found


def _kernel(dtype: str, device: torch.device, rows: int) -> Kernel:
    on_gpu = device.type == "cuda"
    location = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
    kernel = Kernel(
        [("t", rows, COLUMNS[dtype], data_type_to_sparse_type(DATA_TYPES[dtype]), location)],
        device=device,
        output_dtype=SparseType.FP32,
        row_alignment=ROW_ALIGNMENT_BYTES[device.type],
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    kernel.initialize_weights()
    (kernel.weights_dev if on_gpu else kernel.weights_host).fill_(ROW_BYTE)
    return kernel


def _ids(size: Size) -> dict[str, torch.Tensor]:
    """Returns int32 ids. "Zipf" has an exponent of 1 and is spread over the table, as hashed ids
    are."""
    random, count = np.random.default_rng(3), size.bags * BAG_IDS
    ranks = np.exp(random.random(count) * np.log(size.rows)).astype(np.int64)
    both = {
        "uniform": random.integers(0, size.rows, count),
        "Zipf": ranks * SCATTER % size.rows,
    }
    return {name: torch.from_numpy(ids.astype(np.int32)) for name, ids in both.items()}


def _seconds(kernel: Kernel, dtype: str, ids: torch.Tensor, size: Size) -> float:
    offsets = torch.arange(size.bags + 1, dtype=torch.int32, device=ids.device) * BAG_IDS
    sums = kernel(ids, offsets)
    row = dequantize_rows(np.full((1, ROW_BYTES), ROW_BYTE, np.uint8), dtype, COLUMNS[dtype])
    # GPUs dequantize int8 and int4 in half precision.
    relative = 1e-5 if dtype.startswith("float") else 2e-3
    for one in (sums[:1], sums[-1:]):
        np.testing.assert_allclose(one.cpu().numpy(), BAG_IDS * row, rtol=relative)
    return _median(lambda: kernel(ids, offsets), ids.device, size.rounds)


def _copy_seconds(device: torch.device, size: Size) -> float:
    source = torch.ones(size.gathered_bytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return _median(lambda: target.copy_(source), device, size.rounds)


def _median(do: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Returns the median seconds that ``do`` takes, until the device has finished."""
    taken = []
    for _ in range(1 + rounds):  # the first is not counted
        start = time.perf_counter()
        do()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])
