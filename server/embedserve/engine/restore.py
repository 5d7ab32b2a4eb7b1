"""Restores an engine from a published version: devices, plan, shards, TorchScript, warm-up."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import torch

from embedserve.engine.engine import Engine
from embedserve.engine.script import EAGER, KINDS, RowLookup, TensorLookup, compile_lookup
from embedserve.engine.sharded import main_device, shard
from embedserve.engine.unpooled import shard_unpooled
from embedserve_store.errors import StoreError
from embedserve_store.format.manifest import Manifest
from embedserve_store.model_version import ModelVersion
from embedserve_store.plans.plan import Plan
from embedserve_store.plans.planner import check_gpu_memory, plan_under

logger = logging.getLogger(__name__)

CUDA_ROWS_MAX = 2**31 - 1


def restore(
    version: ModelVersion,
    devices: str = "auto",
    *,
    strict_plan: bool = False,
    is_eager: bool = False,
) -> Engine:
    """The engine of ``version``, warm and checked against its goldens.

    Args:
        devices: "cpu:N" (N ranks in this host's memory), "cuda" (one rank on each GPU), or
            "auto": cuda where there is a GPU, else as many CPU ranks as the stored plan has.
        strict_plan: refuse, instead of planning anew, where the stored plan is for another
            number of ranks.
        is_eager: look up by the forward of the DistributedModelParallel, as torchrec has it,
            instead of what is compiled from it.

    Raises:
        StoreError: the version cannot be served on these devices, or answers wrongly.
        ValueError: ``devices`` is not one of the above.
    """
    device_type, world_size = resolve_devices(devices, version.plan.world_size)
    if device_type == "cuda":
        check_fits_cuda(version.manifest)
    plan = _plan_for(version, device_type, world_size, strict_plan)
    if device_type == "cuda":
        check_gpu_memory(plan, version.manifest.tables)
    try:
        lookups = _lookups(version, plan, device_type, is_eager=is_eager)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise StoreError(f"{version.path}: does not fit on {device_type}: {reason}") from error
    device = main_device(device_type)
    compiled = [
        (lookup, EAGER)
        if is_eager
        else compile_lookup(lookup, device, ranks=plan.world_size, is_weighted=is_weighted)
        for lookup, is_weighted in zip(lookups, (False, True), strict=False)
    ]
    engine = Engine(
        version,
        plan,
        device_type,
        lookup=compiled[0][0],
        weighted_lookup=compiled[1][0] if version.manifest.is_pooled else None,
        lookup_kind=max((kind for _, kind in compiled), key=KINDS.index),
    )
    engine.warm_up()
    return engine


def _lookups(
    version: ModelVersion, plan: Plan, device_type: str, *, is_eager: bool
) -> Sequence[TensorLookup | RowLookup]:
    """The plain lookup, and of a pooled model the one with weights; over the module that
    DistributedModelParallel wraps, from which they are compiled, or over the whole of it."""
    features, keys = version.manifest.features, version.manifest.keys
    device = main_device(device_type)
    if not version.manifest.is_pooled:
        unpooled = shard_unpooled(version, plan, device_type)
        sharded = unpooled if is_eager else unpooled.module
        return [RowLookup(sharded, features, keys, device)]
    plain = shard(version, plan, device_type, is_weighted=False)
    weighted = shard(version, plan, device_type, is_weighted=True, rows_of=plain)
    models = (plain, weighted) if is_eager else (plain.module, weighted.module)
    return [TensorLookup(one, features, keys, device) for one in models]


def resolve_devices(devices: str, stored_world_size: int) -> tuple[str, int]:
    """("cpu" or "cuda", number of ranks) of a ``devices`` setting.

    Raises:
        ValueError: not "auto", "cpu:N" or "cuda", or cuda where there is no GPU.
    """
    if match := re.fullmatch(r"cpu:([1-9]\d{0,3})", devices):
        return "cpu", int(match[1])
    if devices not in ("auto", "cuda"):
        raise ValueError(f"devices is {devices!r}, expected auto, cuda or cpu:N (such as cpu:2)")
    gpus = torch.cuda.device_count()
    if devices == "cuda" and not gpus:
        raise ValueError("devices is 'cuda', but PyTorch finds no CUDA GPU on this host")
    return ("cuda", gpus) if gpus else ("cpu", stored_world_size)


def check_fits_cuda(manifest: Manifest) -> None:
    """Raises StoreError for tables whose ids CUDA would truncate: torchrec casts them to int32."""
    for table in manifest.tables:
        if table.num_embeddings > CUDA_ROWS_MAX:
            raise StoreError(
                f"table {table.name!r} has {table.num_embeddings} rows: on CUDA torchrec casts "
                f"ids to int32, so tables have at most {CUDA_ROWS_MAX} rows; serve it on the CPU"
            )


def _plan_for(version: ModelVersion, device_type: str, world_size: int, strict_plan: bool) -> Plan:
    stored = version.plan
    if stored.world_size == world_size:
        return stored
    difference = (
        f"{version.path}: the stored plan is for {stored.world_size} ranks, "
        f"here there are {world_size}"
    )
    if strict_plan:
        raise StoreError(f"{difference}: refused, as strict_plan asks")
    logger.warning("%s: planned anew under the stored constraints", difference)
    return plan_under(
        version.manifest.tables,
        stored.constraints,
        world_size=world_size,
        device_type=device_type,
    )
