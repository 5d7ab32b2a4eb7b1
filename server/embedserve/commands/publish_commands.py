"""Commands that create versions and plan their shards.

Nothing heavy is imported at the top, so that --help responds immediately; torch is imported by the
commands that need it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embedserve.commands.cli_errors import cli_errors
from embedserve.commands.server_commands import Ca, Cert, Key, TokenFile
from embedserve.commands.store_commands import Cache
from embedserve.commands.switch import switch

Checkpoint = Annotated[
    Path,
    typer.Argument(
        help="A folder of torch.distributed.checkpoint, a file of torch.save, or safetensors."
    ),
]
Tables = Annotated[
    Path, typer.Argument(help="YAML or JSON: name, size, features and pooling of each table.")
]
Prefix = Annotated[
    str,
    typer.Option(
        help="Where there are several collections, the dotted path of one in the keys, such as "
        "model.sparse.ebc."
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, float16, int8 or int4, or by table: user=int8,movie=float16. "
        "Default: as the description says."
    ),
]
Sharding = Annotated[
    str | None,
    typer.Option(
        help="table_wise, row_wise, column_wise, data_parallel or auto, or by table: "
        "user=row_wise,movie=auto, or a plan.json. Default: as the description says, or "
        "table_wise."
    ),
]
WorldSize = Annotated[
    int | None, typer.Option(help="Ranks of the sharding plan. Default: 1, or the plan's.")
]
Constraints = Annotated[
    Path | None,
    typer.Option(help="YAML or JSON: for tables, what torchrec's ParameterConstraints take."),
]
DeviceMemory = Annotated[
    str | None, typer.Option(help="Of each rank, such as 80GB; a plan that needs more fails.")
]
MaxError = Annotated[
    float | None,
    typer.Option(
        help="Publish nothing if a table's pooled answers have a larger relative L2 error.",
        min=0,
    ),
]
Expected = Annotated[
    Path | None,
    typer.Option(
        help="What write_expected wrote of the training model: its own answers, which the "
        "description must give."
    ),
]
AcceptUnchecked = Annotated[
    bool,
    switch(
        "--accept-unchecked",
        help="Publish also where the inputs of --expected cannot tell of each feature whether "
        "it is described rightly.",
    ),
]
AcceptDraft = Annotated[
    bool,
    switch(
        "--accept-draft",
        help='Publish also what describe guessed and is marked "check".',
    ),
]
LayoutChanged = Annotated[
    bool,
    switch(
        "--layout-changed",
        help="Publish also where keys, their order, widths or tables, pooling, id rules or "
        "weights are not those of the version before.",
    ),
]
Meta = Annotated[
    list[str] | None,
    typer.Option(help="KEY=VALUE to keep with the version, such as run=8141; may be repeated."),
]
PlanSource = Annotated[
    str,
    typer.Argument(
        help="A description of tables (YAML or JSON), or a model store, a folder or a URL."
    ),
]
PlanSharding = Annotated[
    str | None,
    typer.Option(
        help="auto, table_wise, row_wise, column_wise or data_parallel, for all tables or as "
        "TABLE=TYPE,…; or a plan.json. Default: as described or stored."
    ),
]
FromMetrics = Annotated[
    str | None,
    typer.Option(
        help="Of a server of this version, http://HOST:PORT, https://HOST:PORT or unix:PATH: "
        "the plan that balances what it was asked."
    ),
]
HotPercent = Annotated[
    float,
    typer.Option(help="Of mapped rows, those that memory is to hold.", min=0, max=100),
]


def demo(
    store: Annotated[Path, typer.Argument(help="The model store; made if missing.")],
    model: Annotated[str, typer.Option(help="Name of the model.")] = "movies",
    dtype: Annotated[str, typer.Option(help="float32, float16, int8 or int4.")] = "float32",
    sharding: Annotated[str, typer.Option(help="table_wise or row_wise.")] = "row_wise",
    world_size: Annotated[int, typer.Option(help="Ranks of the sharding plan.")] = 2,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Also save the trained state dict here.")
    ] = None,
    if_missing: Annotated[
        bool,
        switch("--if-missing", help="Do nothing if the store has the model."),
    ] = False,
) -> None:
    """Train a small model on real movie ratings and publish it."""
    with cli_errors():
        from embedserve_store.commands.demo import demo as run

        run(store, model, dtype, sharding, world_size, checkpoint, if_missing)


def publish(
    checkpoint: Checkpoint,
    tables: Tables,
    store: Annotated[str, typer.Argument(help="The model store; made if missing.")],
    model: Annotated[str, typer.Option(help="Name of the model.")],
    prefix: Prefix = "",
    dtype: Dtype = None,
    sharding: Sharding = None,
    world_size: WorldSize = None,
    constraints: Constraints = None,
    device_memory: DeviceMemory = None,
    max_error: MaxError = None,
    expected: Expected = None,
    accept_unchecked: AcceptUnchecked = False,
    accept_draft: AcceptDraft = False,
    layout_changed: LayoutChanged = False,
    meta: Meta = None,
) -> None:
    """Publish the embedding tables of a checkpoint as the next version of a model."""
    with cli_errors():
        from embedserve_store.commands.publish import PublishFlags, publish_checkpoint

        flags = PublishFlags(
            prefix=prefix,
            dtype=dtype,
            sharding=sharding,
            world_size=world_size,
            constraints=constraints,
            device_memory=device_memory,
            max_error=max_error,
            expected=expected,
            accept_unchecked=accept_unchecked,
            accept_draft=accept_draft,
            layout_changed=layout_changed,
            meta=tuple(meta or ()),
        )
        publish_checkpoint(checkpoint, tables, store, model, flags)


def describe(
    checkpoint: Checkpoint,
    prefix: Prefix = "",
    output: Annotated[
        Path | None, typer.Option(help="A new file for the draft. Default: print it.")
    ] = None,
    expected: Annotated[
        Path | None,
        typer.Option(
            help="What write_expected wrote of the training model: fills in features, pooling, "
            "order and weights where the answers show them."
        ),
    ] = None,
) -> None:
    """Draft the description of a checkpoint's tables for publish."""
    with cli_errors():
        from embedserve_store.commands.describe import describe as run

        run(checkpoint, prefix, output, expected)


def plan(
    source: PlanSource,
    model: Annotated[str, typer.Argument(help="Of a store: the model whose plan to show.")] = "",
    version: Annotated[
        str | None, typer.Argument(help="Of the model, or an alias. Default: the newest.")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(help="Ranks. Default: 1, or as the plan says.")
    ] = None,
    sharding: PlanSharding = None,
    constraints: Annotated[
        Path | None,
        typer.Option(help="YAML or JSON: by table, fields of torchrec's ParameterConstraints."),
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Of each rank, such as 80GB or 24GiB: does the plan fit?")
    ] = None,
    device_type: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    output: Annotated[Path | None, typer.Option(help="Write the plan here, for publish.")] = None,
    from_metrics: FromMetrics = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token_file: TokenFile = None,
    cache: Cache = None,
    kubernetes: Annotated[
        bool,
        switch("--kubernetes", help="Print what a pod needs instead, as kustomize's patch."),
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Of such a pod.", min=1, max=256)] = None,
    tables: Annotated[str | None, typer.Option(help="Of such a pod: mapped or resident.")] = None,
    follow: Annotated[
        str | None, typer.Option(help="Of such a pod: none, alias or latest.")
    ] = None,
    hot_percent: HotPercent = 100,
) -> None:
    """Show where a sharding plan places tables and whether they fit, without loading a table."""
    with cli_errors():
        from embedserve.commands.planning.plan import PlanOptions, plan_tables, plan_version
        from embedserve.commands.planning.pod_patch import PodOptions
        from embedserve.commands.running_server import server_at

        asked = None
        if from_metrics is not None:
            asked = server_at(from_metrics, ca, cert, key, token_file)
        elif ca or cert or key or token_file:
            raise ValueError("--ca, --cert, --key and --token-file are of --from-metrics")
        pod = PodOptions(workers, tables, follow, hot_percent / 100) if kubernetes else None
        options = PlanOptions(
            world_size,
            sharding,
            constraints,
            device_memory,
            device_type,
            output,
            asked,
            pod,
        )
        if model:
            plan_version(source, cache, model, version, options)
        else:
            plan_tables(Path(source), options)
