"""Baselines in one process: FBGEMM's kernel alone, embedserve's engine, and a copy of as many
bytes.

    python bench/kernel.py [WORKLOAD]

All use one thread, in alternating rounds; the results are medians in milliseconds.
bench/gpu_check.py runs the same on GPUs.
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


def measure(work: Workload, devices: str = "cpu:1", rounds: int = ROUNDS) -> dict[str, float]:
    """Returns {"kernel": ms, "engine": ms, "copy": ms}.

    Args:
        devices: devices of the engine, cpu:1 or cuda. The kernel runs on the first of them, the
            copy in the memory of this host.
    """
    import torch

    torch.set_num_threads(1)
    candidates = {
        "kernel": _kernel(work, devices.split(":")[0]),
        "engine": _engine(work, devices),
        "copy": _copy(work),
    }
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    requests = len(work.requests)
    for _ in range(rounds):
        for name, look_up in candidates.items():
            start = time.perf_counter()
            for number in range(requests):
                look_up(number)
            samples[name].append((time.perf_counter() - start) / requests * 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


def version_of(work: Workload) -> ModelVersion:
    from embedserve_store import ModelStore

    return ModelStore(work.tables.store).load(work.tables.name)


def _kernel(work: Workload, device_type: str) -> Callable[[int], object]:
    """Returns a lookup by FBGEMM's module alone, with the kernel and the rows of the sharded
    model."""
    import torch

    from embedserve.engine.attach_weights import attach_weights
    from embedserve.engine.sharded import main_device, shard_without_rows

    version, device = version_of(work), main_device(device_type)
    sharded = shard_without_rows(version, version.plan, device_type, is_weighted=False)
    attach_weights(sharded.module, version, device_type)
    (kernel,) = sharded.module.tbes_configs()
    inputs = []
    for request in work.requests:
        offsets = np.concatenate([[0], request.lengths.reshape(-1).cumsum()])
        # On GPUs ids are int32.
        dtype = np.int32 if device_type == "cuda" else np.int64
        arrays = (request.ids.astype(dtype), offsets.astype(dtype))
        inputs.append([torch.from_numpy(array).to(device) for array in arrays])

    def look_up(number: int) -> object:
        with torch.inference_mode():
            values = kernel(*inputs[number])
        if device_type == "cuda":
            torch.cuda.synchronize()
        return values

    return look_up


def _engine(work: Workload, devices: str) -> Callable[[int], object]:
    from embedserve.engine.restore import restore

    engine = restore(version_of(work), devices)
    inputs = [(request.ids, request.lengths.reshape(-1)) for request in work.requests]
    return lambda number: engine.lookup(*inputs[number])


def _copy(work: Workload) -> Callable[[int], object]:
    """Returns a copy, within memory, of as many bytes as the rows that a request reads."""
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
