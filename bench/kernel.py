"""References in one process: the bare FBGEMM kernel, embedserve's engine, a copy of the same bytes.

    python bench/kernel.py [WORKLOAD]

All on one thread, in rounds that take turns; medians in milliseconds.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from workloads import Workload, workload

if TYPE_CHECKING:
    from embedserve_store import ModelVersion

ROUNDS = 15


def measure(work: Workload) -> dict[str, float]:
    """{"kernel": ms, "engine": ms, "copy": ms}"""
    import torch

    torch.set_num_threads(1)
    candidates = {
        "kernel": _kernel(work),
        "engine": _engine(work),
        "copy": _copy(work),
    }
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    requests = len(work.requests)
    for _ in range(ROUNDS):
        for name, look_up in candidates.items():
            start = time.perf_counter()
            for number in range(requests):
                look_up(number)
            samples[name].append((time.perf_counter() - start) / requests * 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


def _version(work: Workload) -> ModelVersion:
    from embedserve_store import ModelStore

    return ModelStore(work.tables.store).load(work.tables.name)


def _kernel(work: Workload) -> Callable[[int], object]:
    """The operator alone, called from Python as FBGEMM's module calls it."""
    import torch
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

    from embedserve.engine.bind import _point, as_tensor
    from embedserve.engine.sharded import kernels_without_rows

    tables, version = work.tables, _version(work)
    names = [f"t{i}" for i in range(tables.count)]
    specs = [
        (name, tables.rows, tables.dim, SparseType.FP32, EmbeddingLocation.HOST) for name in names
    ]
    with kernels_without_rows():
        kernel = IntNBitTableBatchedEmbeddingBagsCodegen(
            specs, device="cpu", output_dtype=SparseType.FP32, row_alignment=1
        )
    _point(kernel, as_tensor(version.tables.data), [version.tables.offsets[n] for n in names])
    inputs = []
    for request in work.requests:
        offsets = np.concatenate([[0], request.lengths.reshape(-1).cumsum()])
        inputs.append((torch.from_numpy(request.ids), torch.from_numpy(offsets)))

    def look_up(number: int) -> object:
        with torch.inference_mode():
            return kernel(*inputs[number])

    return look_up


def _engine(work: Workload) -> Callable[[int], object]:
    from embedserve.engine.restore import restore

    engine = restore(_version(work), "cpu:1")
    inputs = [(request.ids, request.lengths.reshape(-1)) for request in work.requests]
    return lambda number: engine.lookup(*inputs[number])


def _copy(work: Workload) -> Callable[[int], object]:
    """As many bytes as the rows that are read, from one place in memory to another."""
    row_bytes = 4 * work.tables.dim
    sizes = [request.ids.size * row_bytes for request in work.requests]
    source, target = np.ones(max(sizes), np.uint8), np.ones(max(sizes), np.uint8)

    def copy(number: int) -> object:
        target[: sizes[number]] = source[: sizes[number]]
        return target

    return copy


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for chosen in sys.argv[1:] or ["small", "rank", "bulk"]:
        work = workload(chosen, "uniform")
        work.tables.make()
        for name, ms in measure(work).items():
            print(f"{chosen} {name}: {ms:.4f} ms")
