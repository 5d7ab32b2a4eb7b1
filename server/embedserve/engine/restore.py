"""Restores an engine from a published version: devices, plan, shards, compilation, warm-up.

For several versions the devices are settled first, for all of them together.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from embedserve.deltas.live_rows import LiveRows
from embedserve.engine.attach_weights import attach_weights, cpu_rows, share_rows
from embedserve.engine.compile import (
    EAGER,
    Compiled,
    RowLookup,
    TensorLookup,
    compile_lookup,
    own_compilation_unit,
)
from embedserve.engine.cuda_limits import check_columns, check_fits_cuda
from embedserve.engine.engine import Engine
from embedserve.engine.gpu_spare_rows import GpuSpareRows
from embedserve.engine.gpus import (
    LAYOUTS,
    ON_GPUS,
    REPLICAS,
    SHARDS,
    Gpus,
    check_room,
    gpus_for,
    resolve_devices,
    why_unusable,
)
from embedserve.engine.programs import Programs
from embedserve.engine.sharded import main_device, shard_without_rows
from embedserve.engine.unpooled import shard_unpooled_without_rows
from embedserve_store.errors import StoreError
from embedserve_store.model_version import ModelVersion
from embedserve_store.plans.plan import Plan
from embedserve_store.plans.planner import check_table_names, make_plan
from embedserve_store.plans.sharding_types import AUTO

logger = logging.getLogger(__name__)


def settle_devices(
    devices: str,
    versions: Mapping[str, ModelVersion],
    gpus: Gpus,
    *,
    gpu_layout: str = "auto",
    strict_plan: bool = False,
) -> tuple[str, str]:
    """Returns the devices and the GPU layout for all of ``versions``, which are keyed by served
    name.

    Devices "auto" becomes "cuda" if this host's GPUs can hold all versions side by side, else
    "cpu". If GPUs exist and are not used, the reason is logged. The layout "auto" becomes replicas
    if each GPU holds all versions, else shards. Other values are returned unchanged.

    Raises:
        ValueError: the GPUs cannot hold the versions as requested: ``devices`` is "cuda", or
            ``gpu_layout`` is replicas and there are usable GPUs.
    """
    if devices not in ON_GPUS:
        return devices, gpu_layout
    why = why_unusable(gpus)
    requested = "devices is 'cuda'" if devices == "cuda" else ""
    if not why:
        try:
            return "cuda", _layout_of(versions, gpus, gpu_layout, strict_plan)
        except StoreError as error:
            why = str(error)
        if gpu_layout == REPLICAS:
            requested = f"gpu_layout is {gpu_layout!r}"
    if requested:
        raise ValueError(f"{requested}, but {why}")
    if gpus != Gpus():
        logger.warning("tables stay in this host's memory, no GPU is used: %s", why)
    return "cpu", gpu_layout


def _layout_of(
    versions: Mapping[str, ModelVersion], gpus: Gpus, gpu_layout: str, strict_plan: bool
) -> str:
    """Returns the layout in which ``gpus`` hold all of ``versions`` side by side. It is
    ``gpu_layout``, or for "auto" the first of LAYOUTS that fits. On one GPU the layouts are the
    same.

    Raises:
        StoreError: no layout fits; the message is about the last layout tried.
    """
    layouts = LAYOUTS if gpu_layout == "auto" else (gpu_layout,)
    *others, last = layouts if gpus.count > 1 else layouts[:1]
    for layout in others:
        try:
            _check_layout(versions, gpus, layout, strict_plan)
        except StoreError as error:
            logger.info("no %s on %d GPUs: %s", layout, gpus.count, error)
        else:
            return layout
    _check_layout(versions, gpus, last, strict_plan)
    return last


def _check_layout(
    versions: Mapping[str, ModelVersion], gpus: Gpus, layout: str, strict_plan: bool
) -> None:
    """Raises StoreError if ``gpus`` cannot hold all of ``versions`` side by side in ``layout``."""
    table_bytes = {}
    for name, version in versions.items():
        plan = _plan_on_gpus(version, gpus, layout, strict_plan)
        of_one = plan.served_bytes_per_rank(version.manifest.tables, "cuda")
        table_bytes[name] = of_one * (gpus.count // plan.world_size)
    check_room(table_bytes, gpus, layout)


def restore(
    version: ModelVersion,
    devices: str = "auto",
    *,
    gpu_layout: str = "auto",
    strict_plan: bool = False,
    is_eager: bool = False,
    programs: Programs | None = None,
    may_compile: bool = True,
    live: LiveRows | None = None,
    on_warming: Callable[[], None] | None = None,
) -> Engine:
    """Returns the engine of ``version``, warm and checked against its goldens.

    Args:
        devices: "cpu:N" (N ranks in this host's memory), "cpu" (as many ranks as the stored plan),
            "cuda" (all GPUs), or "auto": cuda if there are usable GPUs, else cpu.
        gpu_layout: layout on several GPUs: "replicas" (each has all tables), "shards" (one rank on
            each), or "auto": replicas if they fit, else shards.
        strict_plan: whether to reject a version whose stored plan is for another number of ranks,
            instead of replanning it.
        is_eager: whether lookups run the forward of the DistributedModelParallel, as in torchrec,
            instead of a compiled lookup.
        programs: programs of the layouts compiled before, with the same ``is_eager``. A version
            with a cached layout is neither sharded nor compiled.
        may_compile: whether no other lookup runs through a module meanwhile. While torch.fx traces
            a module it patches all modules of the process.
        live: rows of ``version`` that change while it is served, for an engine on a GPU.
        on_warming: called when the version is restored, before it warms up and is compared.

    Raises:
        StoreError: the version cannot be served on these devices, or its results are wrong.
        ValueError: ``devices`` is not one of the above.
    """
    gpus = gpus_for(devices)
    device_type, world_size = resolve_devices(devices, version.plan.world_size, gpus)
    if device_type == "cuda":
        layout = _layout_of({str(version.path): version}, gpus, gpu_layout, strict_plan)
        plan = _plan_on_gpus(version, gpus, layout, strict_plan)
        first_gpus = range(0, gpus.count, plan.world_size)
    else:
        plan, first_gpus = _plan_for(version, device_type, world_size, strict_plan), range(1)
    if plan is not version.plan:
        logger.warning(
            "%s: planned anew under the stored constraints", _difference(version, plan.world_size)
        )
    known = None
    if programs is not None and device_type == "cpu" and not is_eager:
        known = programs.find(version, plan)
    if known is None and not may_compile:
        raise StoreError(
            f"{version.path}: it has to be compiled anew, and meanwhile lookups that run eagerly "
            "would fail: restart the server to serve it"
        )
    spare_rows = _spare_rows(live, version, gpus) if device_type == "cuda" else None
    if known is None:
        compiled = _compile(
            version, plan, device_type, first_gpus, is_eager=is_eager, spare_rows=spare_rows
        )
    else:
        compiled = [[Compiled.of(one, cpu_rows(version, one.kernels)) for one in known]]
    engine = Engine(version, plan, device_type, compiled, spare_rows)
    if engine.replicas > 1:
        logger.info("%s: %d replicas, a GPU for each", version.path, engine.replicas)
    if on_warming is not None:
        on_warming()
    engine.warm_up()
    return engine


def _spare_rows(live: LiveRows | None, version: ModelVersion, gpus: Gpus) -> GpuSpareRows | None:
    """Returns the room for rows that change on the GPU; None if no row changes.

    Raises:
        StoreError: there are several GPUs, or the memory of one does not suffice.
    """
    if live is None:
        return None
    if gpus.count > 1:
        raise StoreError(
            f"{version.path}: its deltas are applied on one GPU, and there are {gpus.count}: name "
            "one in CUDA_VISIBLE_DEVICES"
        )
    return GpuSpareRows(live, main_device("cuda"))


def _compile(
    version: ModelVersion,
    plan: Plan,
    device_type: str,
    first_gpus: Sequence[int],
    *,
    is_eager: bool,
    spare_rows: GpuSpareRows | None,
) -> list[list[Compiled]]:
    """Returns the lookups of ``version``, sharded by ``plan``, for each replica. A replica is given
    by the GPU of its rank 0. Rows are read for the first replica, and copied from its GPUs to the
    others."""
    check_table_names(version.manifest.tables)
    sharded: list[list[Any]] = []
    try:
        for gpu in first_gpus:
            with _current(device_type, gpu):
                sharded.append(_sharded(version, plan, device_type, gpu, sharded[:1], spare_rows))
        with own_compilation_unit():
            return [
                _lookups(version, plan, device_type, gpu, models, is_eager=is_eager)
                for gpu, models in zip(first_gpus, sharded, strict=True)
            ]
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise StoreError(f"{version.path}: does not fit on {device_type}: {reason}") from error


def _current(device_type: str, gpu: int) -> contextlib.AbstractContextManager[object]:
    """Makes ``gpu`` the current GPU within its block, which applies to operations that name no
    GPU."""
    return contextlib.nullcontext() if device_type == "cpu" else torch.cuda.device(gpu)


def _sharded(
    version: ModelVersion,
    plan: Plan,
    device_type: str,
    gpu: int,
    before: Sequence[list[Any]],
    spare_rows: GpuSpareRows | None,
) -> list[Any]:
    """Returns the plain model, and for a pooled model also the weighted model. The rows are copied
    from the first replica, ``before``, if there is one."""
    if version.manifest.is_pooled:
        models = [
            shard_without_rows(version, plan, device_type, is_weighted=one, first_gpu=gpu)
            for one in (False, True)
        ]
    else:
        models = [shard_unpooled_without_rows(version, plan, device_type, first_gpu=gpu)]
    first, *others = models
    if before:
        share_rows(first.module, before[0][0].module)
    else:
        attach_weights(first.module, version, device_type, spare_rows)
    for other in others:
        share_rows(other.module, first.module)
    return models


def _lookups(
    version: ModelVersion,
    plan: Plan,
    device_type: str,
    gpu: int,
    models: Sequence[Any],
    *,
    is_eager: bool,
) -> list[Compiled]:
    """Returns the lookups over ``models``, as returned by _sharded. Lookups are compiled from the
    module that DistributedModelParallel wraps. Eager lookups use the whole
    DistributedModelParallel."""
    manifest, device = version.manifest, main_device(device_type, gpu)
    features, keys, dims = manifest.features, manifest.keys, manifest.length_per_key
    on_gpu, compiled = device_type == "cuda", []
    with _current(device_type, gpu):
        for model, is_weighted in zip(models, (False, True), strict=False):
            one = model if is_eager else model.module
            lookup: TensorLookup | RowLookup = (
                TensorLookup(one, features, keys, dims, device, takes_offsets=on_gpu)
                if manifest.is_pooled
                else RowLookup(one, features, keys, dims[0], device, takes_offsets=on_gpu)
            )
            compiled.append(
                Compiled(lookup, EAGER)
                if is_eager
                else compile_lookup(lookup, device, ranks=plan.world_size, is_weighted=is_weighted)
            )
    return compiled


def _plan_on_gpus(version: ModelVersion, gpus: Gpus, layout: str, strict_plan: bool) -> Plan:
    """Returns the plan for these GPUs. Raises StoreError if the GPUs and the CUDA kernels cannot
    serve any."""
    check_fits_cuda(version.manifest, version.plan)
    if layout == SHARDS and gpus.apart:
        raise StoreError(gpus.apart)
    ranks = gpus.count if layout == SHARDS else 1
    plan = _plan_for(version, "cuda", ranks, strict_plan)
    check_columns(version.manifest, plan)
    return plan


def _plan_for(version: ModelVersion, device_type: str, world_size: int, strict_plan: bool) -> Plan:
    """Returns the stored plan, or a new plan if the stored plan is for another number of ranks."""
    stored = version.plan
    if stored.world_size == world_size:
        return stored
    if strict_plan:
        raise StoreError(f"{_difference(version, world_size)}: refused, as strict_plan asks")
    return make_plan(
        version.manifest.tables,
        sharding=AUTO,
        world_size=world_size,
        device_type=device_type,
        constraints=stored.constraints,
    )


def _difference(version: ModelVersion, world_size: int) -> str:
    return (
        f"{version.path}: the stored plan is for {version.plan.world_size} ranks, "
        f"one for {world_size} is needed here"
    )
