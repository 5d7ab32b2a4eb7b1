"""Restores an engine from a published version: devices, plan, shards, TorchScript, warm-up.

Of several versions the devices are settled first, for all of them together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from embedserve.engine.bind import mapped_rows
from embedserve.engine.cuda_limits import check_columns, check_fits_cuda
from embedserve.engine.engine import Engine
from embedserve.engine.gpus import (
    ON_GPUS,
    Gpus,
    check_room,
    gpus_for,
    resolve_devices,
    why_unusable,
)
from embedserve.engine.script import (
    EAGER,
    TRACED,
    Compiled,
    RowLookup,
    TensorLookup,
    compile_lookup,
)
from embedserve.engine.sharded import main_device, shard
from embedserve.engine.unpooled import shard_unpooled
from embedserve_store.errors import StoreError
from embedserve_store.format.id_rule import ROW_NUMBERS
from embedserve_store.format.manifest import Manifest
from embedserve_store.model_version import ModelVersion
from embedserve_store.plans.plan import Plan
from embedserve_store.plans.planner import plan_under

logger = logging.getLogger(__name__)


def settle_devices(
    devices: str,
    versions: Mapping[str, ModelVersion],
    gpus: Gpus,
    *,
    strict_plan: bool = False,
) -> str:
    """What ``devices`` means for all of ``versions``, by the name that each is served by: of "auto"
    it is "cuda" where this host's GPUs hold them beside each other, else "cpu", and the log says
    what is against the GPUs that there are. Others stay as they are.

    Raises:
        ValueError: ``devices`` is "cuda", and they cannot.
    """
    if devices not in ON_GPUS:
        return devices
    why = _why_not_on_gpus(versions, gpus, strict_plan)
    if not why:
        return "cuda"
    if devices == "cuda":
        raise ValueError(f"devices is 'cuda', but {why}")
    if gpus != Gpus():
        logger.warning("tables stay in this host's memory, no GPU is used: %s", why)
    return "cpu"


def _why_not_on_gpus(versions: Mapping[str, ModelVersion], gpus: Gpus, strict_plan: bool) -> str:
    """Why not all of ``versions`` can be there beside each other; "" where they can."""
    if why := why_unusable(gpus):
        return why
    try:
        held = {
            name: _held(version, _plan_on_gpus(version, gpus, strict_plan))
            for name, version in versions.items()
        }
        check_room(held, gpus)
    except StoreError as error:
        return str(error)
    return ""


def restore(
    version: ModelVersion,
    devices: str = "auto",
    *,
    strict_plan: bool = False,
    is_eager: bool = False,
    before: Engine | None = None,
    may_compile: bool = True,
    on_warming: Callable[[], None] | None = None,
) -> Engine:
    """The engine of ``version``, warm and checked against its goldens.

    Args:
        devices: "cpu:N" (N ranks in this host's memory), "cpu" (as many as the stored plan has),
            "cuda" (one rank on each GPU), or "auto": cuda where there are GPUs that can be used,
            else cpu.
        strict_plan: refuse, instead of planning anew, where the stored plan is for another
            number of ranks.
        is_eager: look up by the forward of the DistributedModelParallel, as torchrec has it,
            instead of what is compiled from it.
        before: of the version before, restored with the same ``is_eager``. What was compiled of
            it is used again where all that differs are rows and how many a table has: nothing
            is sharded then, and nothing compiled.
        may_compile: whether no other lookup runs meanwhile through a module: torch.fx patches all
            modules of the process while it traces one.
        on_warming: called when it is restored, before it warms up and is compared.

    Raises:
        StoreError: the version cannot be served on these devices, or answers wrongly.
        ValueError: ``devices`` is not one of the above.
    """
    gpus = gpus_for(devices)
    device_type, world_size = resolve_devices(devices, version.plan.world_size, gpus)
    if device_type == "cuda":
        plan = _plan_on_gpus(version, gpus, strict_plan)
        check_room({str(version.path): _held(version, plan)}, gpus)
    else:
        plan = _plan_for(version, device_type, world_size, strict_plan)
    if plan is not version.plan:
        logger.warning(
            "%s: planned anew under the stored constraints", _difference(version, world_size)
        )
    compiled = None if before is None else _compiled_before(before, version, plan, device_type)
    if compiled is None and not may_compile:
        raise StoreError(
            f"{version.path}: it has to be compiled anew, and meanwhile lookups that run eagerly "
            "would fail: restart the server to serve it"
        )
    if compiled is None:
        compiled = _compile(version, plan, device_type, is_eager=is_eager)
    engine = Engine(version, plan, device_type, compiled)
    if on_warming is not None:
        on_warming()
    engine.warm_up()
    return engine


def _compiled_before(
    before: Engine, version: ModelVersion, plan: Plan, device_type: str
) -> list[Compiled] | None:
    """The lookups of ``before`` in the rows of ``version``; None where they are others, or have
    rows that are not read where they are mapped."""
    programs = [one.program for one in before.compiled if one.program is not None]
    plans = (before.plan, before.manifest), (plan, version.manifest)
    has_columns = any(one.column_shard_bytes(manifest.tables) for one, manifest in plans)
    if len(programs) < len(before.compiled) or device_type != "cpu" or has_columns:
        return None
    is_traced = before.lookup_kind == TRACED
    if _layout(before.manifest, before.plan, is_traced) != _layout(
        version.manifest, plan, is_traced
    ):
        return None
    return [Compiled.of(one, mapped_rows(version, one.tables)) for one in programs]


def _layout(manifest: Manifest, plan: Plan, is_traced: bool) -> object:
    """All that what is compiled of a model depends on; a trace, which is of one rank, not on how
    many rows its tables have."""
    tables = [replace(table, sha256="", ids=ROW_NUMBERS) for table in manifest.tables]
    if not is_traced:
        return tables, plan.world_size, plan.tables
    sharding = [plan.tables[table.name].sharding_type for table in tables]
    return [replace(table, num_embeddings=1) for table in tables], plan.world_size, sharding


def _compile(
    version: ModelVersion, plan: Plan, device_type: str, *, is_eager: bool
) -> list[Compiled]:
    """The lookups of ``version``, sharded by ``plan``."""
    try:
        lookups = _lookups(version, plan, device_type, is_eager=is_eager)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise StoreError(f"{version.path}: does not fit on {device_type}: {reason}") from error
    device = main_device(device_type)
    return [
        Compiled(lookup, EAGER)
        if is_eager
        else compile_lookup(lookup, device, ranks=plan.world_size, is_weighted=is_weighted)
        for lookup, is_weighted in zip(lookups, (False, True), strict=False)
    ]


def _lookups(
    version: ModelVersion, plan: Plan, device_type: str, *, is_eager: bool
) -> Sequence[TensorLookup | RowLookup]:
    """The plain lookup, and of a pooled model the one with weights; over the module that
    DistributedModelParallel wraps, from which they are compiled, or over the whole of it."""
    features, keys = version.manifest.features, version.manifest.keys
    dims = version.manifest.length_per_key
    device, on_gpu = main_device(device_type), device_type == "cuda"
    if not version.manifest.is_pooled:
        unpooled = shard_unpooled(version, plan, device_type)
        sharded = unpooled if is_eager else unpooled.module
        return [RowLookup(sharded, features, keys, dims[0], device, takes_offsets=on_gpu)]
    plain = shard(version, plan, device_type, is_weighted=False)
    weighted = shard(version, plan, device_type, is_weighted=True, rows_of=plain)
    models = (plain, weighted) if is_eager else (plain.module, weighted.module)
    return [TensorLookup(one, features, keys, dims, device, takes_offsets=on_gpu) for one in models]


def _plan_on_gpus(version: ModelVersion, gpus: Gpus, strict_plan: bool) -> Plan:
    """Raises StoreError where there is none that CUDA's kernels can serve."""
    check_fits_cuda(version.manifest, version.plan)
    plan = _plan_for(version, "cuda", gpus.count, strict_plan)
    check_columns(version.manifest, plan)
    return plan


def _held(version: ModelVersion, plan: Plan) -> list[int]:
    """The bytes of its tables on each GPU."""
    return plan.served_bytes_per_rank(version.manifest.tables, "cuda")


def _plan_for(version: ModelVersion, device_type: str, world_size: int, strict_plan: bool) -> Plan:
    """The stored plan, or another where that is for another number of ranks."""
    stored = version.plan
    if stored.world_size == world_size:
        return stored
    if strict_plan:
        raise StoreError(f"{_difference(version, world_size)}: refused, as strict_plan asks")
    return plan_under(
        version.manifest.tables,
        stored.constraints,
        world_size=world_size,
        device_type=device_type,
    )


def _difference(version: ModelVersion, world_size: int) -> str:
    return (
        f"{version.path}: the stored plan is for {version.plan.world_size} ranks, "
        f"here there are {world_size}"
    )
