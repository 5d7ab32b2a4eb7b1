"""Restores an engine from a published version: devices, plan, shards, TorchScript, warm-up."""

from __future__ import annotations

import logging
import re

import torch

from embedserve.engine.engine import Engine
from embedserve.engine.script import TensorLookup, compile_lookup
from embedserve.engine.sharded import shard
from embedserve_store.errors import StoreError
from embedserve_store.load import ModelVersion
from embedserve_store.manifest import Manifest
from embedserve_store.plan import Plan
from embedserve_store.planner import plan_under

logger = logging.getLogger(__name__)

CUDA_ROWS_MAX = 2**31 - 1


def restore(version: ModelVersion, devices: str = "auto", *, strict_plan: bool = False) -> Engine:
    """The engine of ``version``, warm and checked against its goldens.

    Args:
        devices: "cpu:N" (N ranks in this host's memory), "cuda" (one rank on each GPU), or
            "auto": cuda where there is a GPU, else as many CPU ranks as the stored plan has.
        strict_plan: refuse, instead of planning anew, where the stored plan is for another
            number of ranks.

    Raises:
        StoreError: the version cannot be served on these devices, or answers wrongly.
        ValueError: ``devices`` is not one of the above.
    """
    device_type, world_size = resolve_devices(devices, version.plan.world_size)
    if device_type == "cuda":
        check_fits_cuda(version.manifest)
    plan = _plan_for(version, device_type, world_size, strict_plan)
    device = torch.device("cpu" if device_type == "cpu" else "cuda:0")
    lookups, are_scripted = [], []
    for is_weighted in (False, True):
        sharded = shard(version, plan, device_type, is_weighted=is_weighted)
        tensors = TensorLookup(
            sharded.module, version.manifest.features, version.manifest.keys, device
        )
        lookup, is_scripted = compile_lookup(tensors)
        lookups.append(lookup)
        are_scripted.append(is_scripted)
    engine = Engine(
        version,
        plan,
        device_type,
        lookup=lookups[0],
        weighted_lookup=lookups[1],
        is_scripted=all(are_scripted),
    )
    engine.warm_up()
    return engine


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
        f"this host offers {world_size}"
    )
    if strict_plan:
        raise StoreError(f"{difference}: refused, as --strict-plan asks")
    logger.warning("%s: planned anew under the stored constraints", difference)
    return plan_under(
        version.manifest.tables,
        stored.constraints,
        world_size=world_size,
        device_type=device_type,
    )
