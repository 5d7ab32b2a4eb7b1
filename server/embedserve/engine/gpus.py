"""The GPUs of this host: their free memory, and reasons why tables cannot be placed on them.

find_gpus() queries torch once; all other functions work on its result. This module allocates no
tensors on a GPU.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import fbgemm_gpu  # noqa: F401  registers torch.ops.fbgemm
import torch

from embedserve_store.errors import StoreError

ON_GPUS = ("auto", "cuda")
"""Values of the ``devices`` setting that permit tables on GPUs."""
REPLICAS, SHARDS = "replicas", "shards"
"""Layouts of tables on several GPUs: all tables on each GPU, or divided by the plan."""
LAYOUTS = (REPLICAS, SHARDS)
"""Layouts in the order of preference: gpu_layout "auto" is the first that is possible."""
SMALLER = {
    REPLICAS: "divide them by gpu_layout shards, or use a smaller dtype",
    SHARDS: "use more GPUs, row_wise sharding for the largest tables or a smaller dtype",
}
"""Advice, by layout, for tables that do not fit."""
LOOKUP_OPERATOR = "fbgemm::int_nbit_split_embedding_codegen_lookup_function"
WORK_BYTES = 512 << 20
"""Bytes of each GPU's memory that tables leave free for batches. They hold two batches at once,
each as large as the limits let a lone request be. A GPU holds the values of a batch up to four
times: as looked up, reordered, the divisors, and rounded."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs that this process sees.

    Attributes:
        count: number of GPUs; 0 if there are none.
        free_bytes: free bytes of each GPU, by its number; empty if CUDA does not start.
        problem: reason why the GPUs cannot be used, or why there are none, if it is known; else "".
        apart: reason why no table can be divided over the GPUs, though each may hold all; else "".
    """

    count: int = 0
    free_bytes: tuple[int, ...] = ()
    problem: str = ""
    apart: str = ""


def gpus_for(devices: str) -> Gpus:
    """Returns the result of find_gpus if the ``devices`` setting permits GPUs. For other settings
    CUDA is not even started."""
    return find_gpus() if devices in ON_GPUS else Gpus()


def find_gpus() -> Gpus:
    """Returns the state of this host's GPUs, as torch reports it. Starts CUDA on each GPU, which
    takes some hundred MB of its memory."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # torch reports an outdated driver only as a warning
        count = torch.cuda.device_count()
    if not count:
        return Gpus(problem="; ".join(_first_line(one.message) for one in caught))
    try:
        torch.cuda.init()
        free_bytes = tuple(torch.cuda.mem_get_info(gpu)[0] for gpu in range(count))
        pairs = list(permutations(range(count), 2))
        apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    except Exception as error:  # torch documents no exception type for an unsuitable driver
        return Gpus(count, problem=f"CUDA does not start: {_first_line(error)}")
    return Gpus(count, free_bytes, _operator_problem(), _peer_problem(apart, len(pairs)))


def _peer_problem(apart: Sequence[tuple[int, int]], pairs: int) -> str:
    if not apart:
        return ""
    one, other = apart[0]
    return (
        f"GPU {one} cannot reach the memory of GPU {other} ({len(apart)} of {pairs} pairs have no "
        "peer access), by which answers of shards are put together: name those that can in "
        "CUDA_VISIBLE_DEVICES, or one alone"
    )


def _operator_problem() -> str:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(LOOKUP_OPERATOR, "CUDA")
    return "" if has_kernel else "FBGEMM has no CUDA kernels here: it is fbgemm-gpu-cpu"


def _first_line(message: object) -> str:
    return next(iter(str(message).splitlines()), "")


def why_unusable(gpus: Gpus) -> str:
    """Returns why no table can be placed on ``gpus``; "" if tables can."""
    if gpus.count:
        return gpus.problem
    problem = f": {gpus.problem}" if gpus.problem else ""
    return f"PyTorch finds no CUDA GPU on this host{problem}"


def resolve_devices(devices: str, stored_world_size: int, gpus: Gpus) -> tuple[str, int]:
    """Returns ("cpu", number of ranks) or ("cuda", number of GPUs) for a ``devices`` setting.

    Raises:
        ValueError: ``devices`` is not "auto", "cpu", "cpu:N" or "cuda", or is "cuda" and no GPU can
            be used.
    """
    if match := re.fullmatch(r"cpu:([1-9]\d{0,3})", devices):
        return "cpu", int(match[1])
    if devices not in ("auto", "cpu", "cuda"):
        raise ValueError(
            f"devices is {devices!r}, expected auto, cuda, cpu or cpu:N (such as cpu:2)"
        )
    why = why_unusable(gpus)
    if devices == "cuda" and why:
        raise ValueError(f"devices is 'cuda', but {why}")
    if devices == "cpu" or why:
        return "cpu", stored_world_size
    return "cuda", gpus.count


def check_room(table_bytes: Mapping[str, Sequence[int]], gpus: Gpus, layout: str) -> None:
    """Raises StoreError if tables do not fit into the free memory of the GPUs.

    Args:
        table_bytes: bytes of tables on each GPU, for each version to be placed there.
        layout: one of LAYOUTS.
    """
    smaller = SMALLER[layout if gpus.count > 1 else SHARDS]  # one GPU cannot divide tables
    for gpu, free_bytes in enumerate(gpus.free_bytes):
        nbytes = sum(one[gpu] for one in table_bytes.values())
        if nbytes + WORK_BYTES > free_bytes:
            raise StoreError(
                f"{', '.join(table_bytes)}: {nbytes:,} bytes of tables do not fit on GPU {gpu}, "
                f"which has {free_bytes:,} free, {WORK_BYTES:,} of them for batches: {smaller}, or "
                "serve them on the CPU"
            )
