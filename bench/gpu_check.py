"""Checks lookups on this host's GPUs for correctness, then measures them: one command, one table.

    make gpu-check                                    # on all GPUs
    make gpu-check CHECK="--devices cpu:2 --quick"    # the same on CPU ranks, in a minute

It covers the installed packages, every kind of lookup, and a server over loopback. It stops at the
first wrong result with status 1. If packages cannot be installed, run `python bench/gpu_check.py`
with the sources on PYTHONPATH, as in the Makefile.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from gpu_timings import (
    CheckOptions,
    Row,
    a_large_table,
    copying,
    gathering_rows,
    loading,
    looking_up,
    serving,
    several_at_once,
    uploading_deltas,
)
from lookup_cases import CASES, Case, check, check_most_rows
from nvml import driver_rows

from embedserve.engine.cuda_limits import ROWS_MAX
from embedserve.engine.gpus import WORK_BYTES, gpus_for, resolve_devices

PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy")
QUICK_CASES = ("float32 row_wise", "int8 row_wise unpooled")

Step = Callable[[CheckOptions], Iterable[Row]]


def installed(asked: CheckOptions) -> Iterator[Row]:
    yield "Python", sys.version.split()[0]
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
    gpus = gpus_for(asked.devices)
    device_type, ranks = resolve_devices(asked.devices, 1, gpus)
    yield "ranks", f"{ranks} {device_type}"
    yield from driver_rows()
    if not asked.is_cuda:
        yield "cores", str(len(os.sched_getaffinity(0)))
        return
    yield "CUDA", str(torch.version.cuda)
    for gpu, free_bytes in enumerate(gpus.free_bytes):
        of_gpu = torch.cuda.get_device_properties(gpu)
        yield (
            f"GPU {gpu}",
            f"{of_gpu.name}, sm_{of_gpu.major}{of_gpu.minor}, {of_gpu.total_memory / 1e9:.1f} GB, "
            f"{free_bytes / 1e9:.1f} free",
        )


def right_answers(asked: CheckOptions) -> Iterator[Row]:
    """Checks every dtype under every sharding, over all GPUs: plain, weighted, one example, empty
    bags."""
    for case in _cases(asked):
        start = time.perf_counter()
        check(case, asked.folder / str(case), asked.devices)
        yield str(case), f"right, after {time.perf_counter() - start:.1f} s"


def _cases(asked: CheckOptions) -> list[Case]:
    return [one for one in CASES if not asked.is_quick or str(one) in QUICK_CASES]


def replicas(asked: CheckOptions) -> Iterator[Row]:
    """Checks the same with all tables on each of several GPUs, through each of them."""
    count = gpus_for(asked.devices).count
    if count < 2:
        yield "a copy on each GPU", "left out: there is no second GPU"
        return
    for case in _cases(asked):
        start = time.perf_counter()
        folder = asked.folder / f"{case} replicas"
        check(case, folder, asked.devices, gpu_layout="replicas")
        yield f"{case}, {count} GPUs", f"right, after {time.perf_counter() - start:.1f} s"


def largest_ids(asked: CheckOptions) -> Iterator[Row]:
    what = f"ids up to {ROWS_MAX - 1:,}"
    gpus = gpus_for(asked.devices)
    if asked.is_cuda and gpus.free_bytes[0] < 16 * ROWS_MAX + WORK_BYTES:
        yield what, "left out: their rows take 34 GB of a GPU"
        return
    check_most_rows(asked.folder / "most rows", asked.one_device)
    yield what, "right"


def unified_memory(asked: CheckOptions) -> Iterator[Row]:
    yield "quant_uvm, quant_uvm_caching", "left out: tables are served from GPUs' own memory alone"


STEPS: tuple[Step, ...] = (
    installed,
    right_answers,
    replicas,
    largest_ids,
    loading,
    a_large_table,
    copying,
    gathering_rows,
    looking_up,
    several_at_once,
    uploading_deltas,
    unified_memory,
    serving,
)


def run(asked: CheckOptions, steps: Sequence[Step] = STEPS) -> int:
    """Runs the steps and prints their results. Returns the status: 1 if a step failed, which skips
    the steps after it."""
    rows: list[tuple[str, str, str]] = []
    wrong: Exception | None = None
    for step in steps:
        name = step.__name__.replace("_", " ")
        try:
            for what, found in step(asked):
                print(f"{name}: {what}: {found}", file=sys.stderr)
                rows.append((name, what, found))
        except Exception as error:  # after any failure, further steps would mean nothing
            wrong = error
            rows.append((name, "WRONG", next(iter(str(error).strip().splitlines()), repr(error))))
            break
        _let_go()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for step_name, what, found in rows:
        print(f"{step_name:{widths[0]}}  {what:{widths[1]}}  {found}")
    if wrong is not None:
        traceback.print_exception(wrong)
    return int(wrong is not None)


def _let_go() -> None:
    """Frees memory of a finished step, whose modules refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="cuda", help="cuda, or cpu:N for N ranks in memory")
    parser.add_argument("--quick", action="store_true", help="a little of each step")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="embedserve-gpu-check-") as folder:
        return run(CheckOptions(options.devices, options.quick, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
