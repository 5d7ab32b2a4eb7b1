"""Commands that create versions and plan their shards.

Nothing heavy is imported at the top, so that --help responds immediately; torch is imported by the
commands that need it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from embedserve.commands.installation import check_engine, check_releases, installed_versions
from embedserve.commands.server_commands import Ca, Cert, Key, TokenFile
from embedserve.commands.store_commands import Version, check_store, store_argument
from embedserve.commands.switch import switch

PLACES_MAX = 1024
"""Most ranks and hosts of a plan, as many as the parts whose absence a router counts. The planner
and the view of a plan take minutes for ten times as many."""

Checkpoint = Annotated[
    Path,
    typer.Argument(
        help="Folder of torch.distributed.checkpoint, file of torch.save, or file or"
        " folder of safetensors. A path, never a URL: copy a checkpoint in a bucket first."
    ),
]
Tables = Annotated[
    Path, typer.Argument(help="Description of the tables, YAML or JSON, as describe drafts it.")
]
Prefix = Annotated[
    str,
    typer.Option(
        help="Dotted path of the collection to use, such as model.sparse.ebc. "
        "Required if the checkpoint has several."
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Type of stored rows: float32, float16, int8 or int4; or by table, such"
        " as user=int8,movie=float16. Default: from the description."
    ),
]
Sharding = Annotated[
    str | None,
    typer.Option(
        help="Sharding: table_wise, row_wise, column_wise, data_parallel or auto; or"
        " by table, such as user=row_wise,movie=auto; or a file written by plan"
        " --output. Default: from the description, else table_wise."
    ),
]
WorldSize = Annotated[
    int | None,
    typer.Option(
        help="Ranks of the sharding plan. Default: from the plan, else 1.", min=1, max=PLACES_MAX
    ),
]
Hosts = Annotated[
    int | None,
    typer.Option(
        help="Hosts over which the tables are divided by rows, with the ranks of the plan on each."
        " Above 1, the default sharding is auto. Default: from the plan, else 1.",
        min=1,
        max=PLACES_MAX,
    ),
]
Constraints = Annotated[
    Path | None,
    typer.Option(help="YAML or JSON: fields of TorchRec's ParameterConstraints by table."),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(help="Memory of each rank, such as 80GB. A plan that needs more fails."),
]
MaxError = Annotated[
    float | None,
    typer.Option(
        help="Largest relative L2 error of a table's pooled outputs. Beyond it nothing is "
        "published.",
        min=0,
    ),
]
Expected = Annotated[
    Path | None,
    typer.Option(
        help="File written by write_expected in the training. Its outputs are "
        "compared with those of the described tables; nothing is published if "
        "they differ."
    ),
]
AcceptUnchecked = Annotated[
    bool,
    switch(
        "--accept-unchecked",
        help="Publish even if the inputs of --expected cannot verify the description"
        " of every feature.",
    ),
]
AcceptDraft = Annotated[
    bool,
    switch(
        "--accept-draft",
        help='Publish even if lines of the description are marked "check", as guesses.',
    ),
]
LayoutChanged = Annotated[
    bool,
    switch(
        "--layout-changed",
        help="Publish even if keys, their order, widths or tables, pooling, id rules"
        " or weights differ from those of the previous version.",
    ),
]
IfChanged = Annotated[
    bool,
    switch(
        "--if-changed",
        help="Publish nothing if the newest version has the same rows, tables, features, id rules"
        " and plan, and name that version. Goldens and provenance may differ. A version whose files"
        " are incomplete counts as changed; one with damaged rows does not.",
    ),
]
Meta = Annotated[
    list[str] | None,
    typer.Option(help="KEY=VALUE to store with the version, such as run=8141. Repeatable."),
]
PlanSource = Annotated[
    str,
    store_argument(
        "Description of the tables (YAML or JSON), or a model store: a folder or a URL."
    ),
]
PlanSharding = Annotated[
    str | None,
    typer.Option(
        help="Sharding: auto, table_wise, row_wise, column_wise or data_parallel; or"
        " by table, such as user=row_wise,movie=auto; or a file written by plan"
        " --output. Default: from the description or the stored plan."
    ),
]
FromMetrics = Annotated[
    str | None,
    typer.Option(
        help="Address of a server of this version: http://HOST:PORT, "
        "https://HOST:PORT or unix:PATH. Shows the plan that balances the "
        "requests that it received."
    ),
]
POD_OPTIONS = "--workers, --tables, --follow, --hot-percent and --store"
HotPercent = Annotated[
    float,
    typer.Option(help="Percent of mapped rows that the pod's memory holds.", min=0, max=100),
]
PodFollow = Annotated[
    str | None, typer.Option(help="The pod's setting `follow`: none, alias or latest.")
]
PodStore = Annotated[
    str | None,
    typer.Option(
        callback=check_store,
        help="Store that the pod reads, if SOURCE is a description or another store. Behind a URL "
        "the pod has room for pulled versions.",
    ),
]


def demo(
    store: Annotated[str, store_argument("Folder of the model store; created if missing.")],
    model: Annotated[str, typer.Option(help="Name of the model.")] = "movies",
    dtype: Annotated[
        str, typer.Option(help="Type of stored rows: float32, float16, int8 or int4.")
    ] = "float32",
    sharding: Annotated[str, typer.Option(help="Sharding: table_wise or row_wise.")] = "row_wise",
    world_size: Annotated[
        int, typer.Option(help="Ranks of the sharding plan.", min=1, max=PLACES_MAX)
    ] = 2,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Also save the trained state dict here.")
    ] = None,
    if_missing: Annotated[
        bool,
        switch("--if-missing", help="Do nothing if the store has the model."),
    ] = False,
) -> None:
    """Train a small model on real movie ratings and publish it."""
    from embedserve_store.remote.remote_store import is_url

    if is_url(store):
        raise ValueError(f"store is {store!r}, expected a folder: copy it to a URL afterwards")
    check_engine()
    from embedserve_store.commands.demo import demo as run

    run(Path(store), model, dtype, sharding, world_size, checkpoint, if_missing)


def publish(
    checkpoint: Checkpoint,
    tables: Tables,
    store: Annotated[
        str, store_argument("Model store, a folder or a URL; a folder is created if missing.")
    ],
    model: Annotated[str, typer.Option(help="Name of the model.")],
    prefix: Prefix = "",
    dtype: Dtype = None,
    sharding: Sharding = None,
    world_size: WorldSize = None,
    hosts: Hosts = None,
    constraints: Constraints = None,
    device_memory: DeviceMemory = None,
    max_error: MaxError = None,
    expected: Expected = None,
    accept_unchecked: AcceptUnchecked = False,
    accept_draft: AcceptDraft = False,
    layout_changed: LayoutChanged = False,
    if_changed: IfChanged = False,
    meta: Meta = None,
) -> None:
    """Publish the embedding tables of a checkpoint as the next version of a model."""
    check_engine()
    from embedserve_store.commands.per_table_option import parse_per_table_option, parse_sharding
    from embedserve_store.commands.publish import parse_meta, publish_checkpoint
    from embedserve_store.plans.constraints import read_constraints
    from embedserve_store.terminal.sizes import parse_bytes

    publish_checkpoint(
        checkpoint,
        tables,
        store,
        model,
        prefix=prefix,
        dtype=parse_per_table_option(dtype) if dtype is not None else None,
        sharding=parse_sharding(sharding) if sharding is not None else None,
        world_size=world_size,
        hosts=hosts,
        constraints=read_constraints(constraints) if constraints else None,
        device_memory_bytes=(
            parse_bytes(device_memory, "device_memory") if device_memory is not None else None
        ),
        max_error=max_error,
        expected=expected,
        accept_unchecked=accept_unchecked,
        accept_draft=accept_draft,
        layout_changed=layout_changed,
        if_changed=if_changed,
        meta=parse_meta(meta or ()),
    )


def describe(
    checkpoint: Checkpoint,
    prefix: Prefix = "",
    output: Annotated[
        Path | None, typer.Option(help="New file for the draft. Default: print it.")
    ] = None,
    expected: Annotated[
        Path | None,
        typer.Option(
            help="File written by write_expected in the training. Fills in features, "
            "pooling, order and weights as far as its outputs show them."
        ),
    ] = None,
) -> None:
    """Draft the description of a checkpoint's tables for publish."""
    from embedserve_store.commands.describe import describe as run

    run(checkpoint, prefix, output, expected)


def plan(
    source: PlanSource,
    model: Annotated[str, typer.Argument(help="Name of the model, if SOURCE is a store.")] = "",
    version: Version = None,
    world_size: WorldSize = None,
    sharding: PlanSharding = None,
    hosts: Hosts = None,
    constraints: Constraints = None,
    device_memory: Annotated[
        str | None,
        typer.Option(help="Memory of each rank, such as 80GB or 24GiB. Status 1 if too small."),
    ] = None,
    device_type: Annotated[str, typer.Option(help="Type of device: cpu or cuda.")] = "cpu",
    output: Annotated[
        Path | None, typer.Option(help="File to write the plan to, for publish --sharding.")
    ] = None,
    from_metrics: FromMetrics = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token_file: TokenFile = None,
    kubernetes: Annotated[
        bool,
        switch(
            "--kubernetes",
            help="Print a kustomize patch with the resources of a pod instead of the plan; for a "
            "plan over several hosts, the manifests of the shards.",
        ),
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Workers of the pod.", min=1, max=256)] = None,
    tables: Annotated[
        str | None, typer.Option(help="The pod's setting `tables`: mapped or resident.")
    ] = None,
    follow: PodFollow = None,
    hot_percent: HotPercent = 100,
    store: PodStore = None,
) -> None:
    """Show where a sharding plan places tables and whether they fit.

    Reads no table, and pulls nothing of a version behind a URL but its manifest and its plan.
    """
    check_releases(installed_versions())
    from embedserve.commands.planning.plan import PlanOptions, plan_tables, plan_version
    from embedserve.commands.planning.pod_patch import PodOptions
    from embedserve.commands.running_server import server_at

    measured_server = None
    if from_metrics is not None:
        measured_server = server_at(from_metrics, ca, cert, key, token_file)
    elif ca or cert or key or token_file:
        raise ValueError("--ca, --cert, --key and --token-file need --from-metrics")
    pod = PodOptions(workers, tables, follow, hot_percent / 100, store or "")
    if not kubernetes and pod != PodOptions():
        raise ValueError(f"{POD_OPTIONS} need --kubernetes")
    options = PlanOptions(world_size, sharding, constraints, device_memory, device_type, output)
    options = replace(
        options, from_metrics=measured_server, hosts=hosts, pod=pod if kubernetes else None
    )
    if model:
        plan_version(source, model, version, options)
    else:
        plan_tables(Path(source), options)
