"""`embedserve plan`: shows where a sharding plan places tables and whether they fit, loading none.

For a description of tables it computes a plan. For a published version it shows the stored plan, or
the plan for a host with other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from embedserve.commands.installation import check_engine
from embedserve.commands.planning.access_stats import read_access_stats
from embedserve.commands.planning.plan_from_metrics import propose, show_balance
from embedserve.commands.planning.pod_patch import PodOptions, PodRows, pod_patch
from embedserve.commands.planning.shard_manifests import shard_manifests
from embedserve.commands.running_server import ServerClient
from embedserve_store.commands.per_table_option import parse_sharding
from embedserve_store.commands.plan_view import count_ranks, show_plan
from embedserve_store.errors import StoreError
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.format.tables_file import tables_file_bytes
from embedserve_store.format.version_folder import to_json_bytes
from embedserve_store.ids.id_map import ids_file_bytes
from embedserve_store.model_store import ModelStore
from embedserve_store.plans.constraints import TableConstraints, read_constraints
from embedserve_store.plans.host_plan import with_hosts
from embedserve_store.plans.part_plan import check_parts_fit, fullest_rank_bytes, largest_part_bytes
from embedserve_store.plans.plan import ROW_ALIGNMENT_BYTES, Plan
from embedserve_store.sources.description import read_description
from embedserve_store.terminal.aligned_columns import out
from embedserve_store.terminal.console import console, say
from embedserve_store.terminal.sizes import human_bytes, parse_bytes
from embedserve_store.transfer.file_check import IDS, TABLES
from embedserve_store.writing.small_files import write_output

if TYPE_CHECKING:
    from embedserve_store.plans.planner import Sharding


@dataclass(frozen=True)
class PlanOptions:
    """Command line options of the plan; None keeps what is described or stored."""

    world_size: int | None = None
    sharding: str | None = None
    constraints: Path | None = None
    device_memory: str | None = None
    device_type: str = "cpu"
    output: Path | None = None
    from_metrics: ServerClient | None = None
    hosts: int | None = None
    pod: PodOptions | None = None
    """If set, the resources of a pod for the plan are printed instead of the plan; for a plan with
    parts, the manifests of the shards."""

    def __post_init__(self) -> None:
        """Raises ValueError if the device type is neither cpu nor cuda."""
        if self.device_type not in ROW_ALIGNMENT_BYTES:
            raise ValueError(f"device_type is {self.device_type!r}, expected cpu or cuda")


def plan_tables(description: Path, options: PlanOptions) -> None:
    """Plans the tables of a description as publishing would, and shows the plan.

    Raises:
        StoreError: the description, plan or constraints are wrong, or a rank does not fit.
        ValueError: an option cannot be parsed.
        OSError: the output cannot be written.
    """
    if options.from_metrics is not None:
        raise ValueError("--from-metrics needs a published version: name a store and its model")
    if description.is_dir():
        names = ", ".join(ModelStore(description).models()) or "none"
        raise StoreError(f"{description}: is a store, name one of its models: {names}")
    described = read_description(description)
    tables = described.tables
    sharding = parse_sharding(options.sharding) if options.sharding is not None else None
    planned = _planned(tables, sharding, {}, options, described.sharding)
    ids = ids_file_bytes({one.name: one.num_embeddings for one in tables if one.ids.rule == "map"})
    features = len({name for one in tables for name in one.feature_names})
    rows = PodRows(str(description), tables_file_bytes(tables) + ids, ids=ids, features=features)
    _show(tables, planned, options, rows)


def plan_version(store: str, model: str, version: str | None, options: PlanOptions) -> None:
    """Shows the plan of a published version, a new plan under ``options``, or a plan balanced by
    the reads of a running server.

    Reads the version's manifest and plan. Pulls nothing.

    Raises:
        StoreError, ValueError, OSError: as ``plan_tables``; or the server cannot be reached, serves
            another version or has read nothing yet.
    """
    models = ModelStore(store)
    found = models.stored(model, version)
    manifest, stored = found.manifest, found.plan()
    aliases = len(models.aliases(model)) if options.pod is not None else 0
    tables = manifest.tables
    name = f"{model}@{manifest.version} of {store}"
    ids = found.files.get(IDS, 0)
    mapped = found.files[TABLES] + ids
    rows = PodRows(
        name,
        mapped,
        is_pulled=models.is_remote,
        ids=ids,
        model=model,
        aliases=aliases,
        features=len(manifest.features),
    )
    if options.from_metrics is not None:
        _plan_from_metrics(manifest, stored, options, rows)
        return
    if options.world_size is None:
        options = replace(options, world_size=stored.world_size)
    if options.sharding is not None:
        sharding = parse_sharding(options.sharding)
        kept: dict[str, TableConstraints] = {}
        if not isinstance(sharding, str | Plan):
            stored_ones = stored.constraints.items()
            kept = {name: one for name, one in stored_ones if name not in sharding}
        planned = _planned(tables, sharding, kept, options)
    elif options.constraints or options.world_size != stored.world_size:
        planned = _planned(tables, "auto", stored.constraints, options)
        say(f"planned anew: the stored plan is for {count_ranks(stored.world_size)}")
    else:
        planned = stored
    if options.hosts is None and options.sharding is None:
        planned = replace(planned, hosts=stored.hosts)
    elif planned is stored:
        planned = with_hosts(stored, tables, options.hosts)
    _show(tables, planned, options, rows)


def _plan_from_metrics(
    manifest: Manifest, stored: Plan, options: PlanOptions, rows: PodRows
) -> None:
    assert options.from_metrics is not None
    measured = read_access_stats(options.from_metrics, manifest, stored)
    tables = manifest.tables
    sharding = parse_sharding(options.sharding) if options.sharding is not None else None
    if isinstance(sharding, Plan):
        plan = _planned(tables, sharding, {}, options)
    else:
        world_size = measured.world_size if options.world_size is None else options.world_size
        constraints = read_constraints(options.constraints) if options.constraints else None
        plan = propose(
            tables,
            stored,
            measured,
            world_size,
            sharding,
            constraints,
            options.device_type,
            _memory_bytes(options),
        )
        plan = with_hosts(replace(plan, hosts=stored.hosts), tables, options.hosts)
    show_more = partial(show_balance, manifest, measured, options.device_type)
    _show(tables, plan, options, rows, show_more)


def _planned(
    tables: Sequence[TableSpec],
    sharding: Sharding | None,
    constraints: Mapping[str, TableConstraints],
    options: PlanOptions,
    described: Mapping[str, str] | None = None,
) -> Plan:
    """Computes a plan. Tables without ``sharding`` have the types ``described``; without any
    ``sharding`` the others have publishing's defaults."""
    if options.constraints:
        constraints = read_constraints(options.constraints)
    check_engine()  # before seconds of imports
    with console.status("importing the planner …"):
        from embedserve_store.plans.planner import make_plan
        from embedserve_store.plans.planner_request import default_sharding
    if sharding is None:
        sharding = default_sharding(tables, described or {}, constraints, options.hosts)
    elif not isinstance(sharding, str | Plan):
        sharding = {**(described or {}), **sharding}
    return make_plan(
        tables,
        sharding=sharding,
        world_size=options.world_size,
        device_type=options.device_type,
        device_memory_bytes=_memory_bytes(options),
        constraints=constraints,
        hosts=options.hosts,
        must_fit=False,
    )


def _memory_bytes(options: PlanOptions) -> int | None:
    memory = options.device_memory
    return parse_bytes(memory, "device_memory") if memory is not None else None


def _show(
    tables: Sequence[TableSpec],
    plan: Plan,
    options: PlanOptions,
    rows: PodRows,
    show_more: Callable[[Plan], None] = lambda plan: None,
) -> None:
    """Prints the plan before it checks whether the plan fits, because the user needs to see a plan
    that has to be changed."""
    memory_bytes = _memory_bytes(options)
    device_type = options.device_type
    copied = plan.column_shard_bytes(tables)
    if options.pod is not None:
        is_pulled = "://" in options.pod.store if options.pod.store else rows.is_pulled
        rows = replace(rows, copied=copied, is_pulled=is_pulled)
        print(_for_kubernetes(tables, plan, device_type, rows, options.pod), end="")
    else:
        show_plan(out, tables, plan, device_type=device_type, memory_bytes=memory_bytes)
        show_more(plan)
    if copied and device_type == "cpu":
        say(f"on the CPU {human_bytes(copied)} of column shards are copied, all else is mapped")
    if memory_bytes is not None:
        check_parts_fit(plan, tables, [memory_bytes] * plan.world_size, device_type)
        fullest = fullest_rank_bytes(plan, tables, device_type)
        say(
            f"fits: the fullest rank takes {human_bytes(fullest)} of its "
            f"{human_bytes(memory_bytes)}, {100 * fullest / memory_bytes:.0f}%"
        )
    if options.output:
        write_output(options.output, to_json_bytes(plan.to_json()), may_replace=True)
        say(f"wrote {options.output}")


def _for_kubernetes(
    tables: Sequence[TableSpec], plan: Plan, device_type: str, rows: PodRows, pod: PodOptions
) -> str:
    """Returns the patch of a pod with whole tables, or the shards of a plan with parts."""
    if plan.hosts is None:
        return pod_patch(rows, pod, plan.world_size if device_type == "cuda" else 0)
    if device_type == "cuda":
        raise ValueError(
            f"device_type is 'cuda', but the plan has {plan.hosts.parts} parts: there are no "
            "manifests of shards on GPUs"
        )
    mapped, copied = largest_part_bytes(plan, tables)
    return shard_manifests(plan.hosts.parts, replace(rows, mapped=mapped, copied=copied), pod)
