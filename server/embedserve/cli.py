"""The command line: demo, publish, inspect and serve.

Imports nothing heavy at the top, so that --help answers at once; torch comes with the command
that needs it. What a person did wrong is one line on stderr and exit status 1, no traceback.
"""

from __future__ import annotations

import contextlib
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from embedserve import __version__
from embedserve.config import Limits, ServeSettings

app = typer.Typer(
    name="embedserve",
    help="Serves the embedding tables of trained TorchRec models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DEFAULTS = ServeSettings(store=Path("store"))
LIMITS = Limits()
PORTS = {"min": 0, "max": 65535}


def _env(name: str) -> str:
    return f"EMBEDSERVE_{name.upper()}"


def _setting(name: str, help_text: str, **extra: Any) -> Any:
    """A serve option that can also be given as EMBEDSERVE_<NAME>."""
    return typer.Option(envvar=_env(name), help=help_text, **extra)


def _limit(name: str, help_text: str) -> Any:
    return _setting(name, help_text, rich_help_panel="Limits", min=0)


def _read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Makes the keys of the TOML file defaults; flags and EMBEDSERVE_* variables beat them."""
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path}: {error}") from error
    known = {f.name for f in (*fields(ServeSettings), *fields(Limits))} - {"limits"}
    for key in values:
        if key not in known:
            raise typer.BadParameter(
                f"{path}: unknown key {key!r}; there are {', '.join(sorted(known))}"
            )
    ctx.default_map = {**(ctx.default_map or {}), **values}
    return path


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"embedserve {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Serves the embedding tables of trained TorchRec models."""


@app.command()
def serve(
    store: Annotated[
        Path, typer.Argument(envvar="EMBEDSERVE_STORE", help="The model store, a folder.")
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            callback=_read_config,
            is_eager=True,
            envvar="EMBEDSERVE_CONFIG",
            help="A TOML file with any of these settings, named as here with '_'.",
        ),
    ] = None,
    host: Annotated[str, _setting("host", "Address to listen on; 0.0.0.0 for all.")] = (
        DEFAULTS.host
    ),
    http_port: Annotated[int, _setting("http_port", "REST, health and metrics.", **PORTS)] = (
        DEFAULTS.http_port
    ),
    grpc_port: Annotated[int, _setting("grpc_port", "gRPC.", **PORTS)] = DEFAULTS.grpc_port,
    model: Annotated[
        list[str] | None,
        _setting("model", "A model to serve; may be repeated. Default: all of the store."),
    ] = None,
    default_model: Annotated[
        str, _setting("default_model", "Answers requests that name none.")
    ] = DEFAULTS.default_model,
    devices: Annotated[
        str,
        _setting("devices", "cuda, cpu:N for N ranks in memory, or auto: what fits the plan."),
    ] = DEFAULTS.devices,
    strict_plan: Annotated[
        bool,
        _setting("strict_plan", "Refuse to start where the stored plan does not fit the host."),
    ] = DEFAULTS.strict_plan,
    verify: Annotated[
        bool, _setting("verify", "First check every byte of the store against its checksums.")
    ] = DEFAULTS.verify,
    drain_s: Annotated[
        float, _setting("drain_s", "Seconds for accepted requests after SIGTERM.", min=0)
    ] = DEFAULTS.drain_s,
    log_level: Annotated[
        str, _setting("log_level", "debug, info, warning or error.")
    ] = DEFAULTS.log_level,
    body_bytes_max: Annotated[
        int, _limit("body_bytes_max", "Bytes of one request's body or message.")
    ] = LIMITS.body_bytes_max,
    request_examples_max: Annotated[
        int, _limit("request_examples_max", "Examples of one request.")
    ] = LIMITS.request_examples_max,
    request_output_bytes_max: Annotated[
        int, _limit("request_output_bytes_max", "Bytes of one answer's float32 values.")
    ] = LIMITS.request_output_bytes_max,
    batch_ids_max: Annotated[
        int, _limit("batch_ids_max", "Ids of a batch of several requests.")
    ] = LIMITS.batch_ids_max,
    batch_output_bytes_max: Annotated[
        int, _limit("batch_output_bytes_max", "Bytes of such a batch's values.")
    ] = LIMITS.batch_output_bytes_max,
    queue_examples_max: Annotated[
        int, _limit("queue_examples_max", "Examples waiting before requests are refused.")
    ] = LIMITS.queue_examples_max,
    queue_ids_max: Annotated[
        int, _limit("queue_ids_max", "Ids waiting before requests are refused.")
    ] = LIMITS.queue_ids_max,
    delay_ms_max: Annotated[
        float, _limit("delay_ms_max", "How long a lone request waits for company; for GPUs.")
    ] = LIMITS.delay_ms_max,
    inline_bytes_max: Annotated[
        int,
        _limit("inline_bytes_max", "A batch that moves more runs in a thread of its own."),
    ] = LIMITS.inline_bytes_max,
) -> None:
    """Serve the models of a store over REST and gRPC.

    Every setting can be a flag, an EMBEDSERVE_* variable or a key of the TOML file; the first
    of these wins.
    """
    limits = Limits(
        body_bytes_max=body_bytes_max,
        request_examples_max=request_examples_max,
        request_output_bytes_max=request_output_bytes_max,
        batch_ids_max=batch_ids_max,
        batch_output_bytes_max=batch_output_bytes_max,
        queue_examples_max=queue_examples_max,
        queue_ids_max=queue_ids_max,
        delay_ms_max=delay_ms_max,
        inline_bytes_max=inline_bytes_max,
    )
    settings = ServeSettings(
        store=store,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        model=tuple(model or ()),
        default_model=default_model,
        devices=devices,
        strict_plan=strict_plan,
        verify=verify,
        drain_s=drain_s,
        log_level=log_level,
        limits=limits,
    )
    with one_line_errors():
        from embedserve.commands.serve import serve as run

        run(settings)


@app.command()
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
        bool, typer.Option("--if-missing", help="Do nothing if the store has the model.")
    ] = False,
) -> None:
    """Train a small model on real movie ratings and publish it."""
    with one_line_errors():
        from embedserve.commands.demo import demo as run

        run(store, model, dtype, sharding, world_size, checkpoint, if_missing)


@app.command()
def publish(
    checkpoint: Annotated[Path, typer.Argument(help="A state dict written by torch.save.")],
    tables: Annotated[
        Path, typer.Argument(help="YAML or JSON: name, size, features and pooling of each table.")
    ],
    store: Annotated[Path, typer.Argument(help="The model store; made if missing.")],
    model: Annotated[str, typer.Option(help="Name of the model.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, float16, int8 or int4. Default: as the description says."),
    ] = None,
    sharding: Annotated[str, typer.Option(help="table_wise or row_wise.")] = "table_wise",
    world_size: Annotated[int, typer.Option(help="Ranks of the sharding plan.")] = 1,
) -> None:
    """Publish the embedding tables of a checkpoint as the next version of a model."""
    with one_line_errors():
        from embedserve.commands.publish import publish as run

        run(checkpoint, tables, store, model, dtype, sharding, world_size)


@app.command()
def inspect(
    store: Annotated[Path, typer.Argument(help="The model store.")],
    model: Annotated[str, typer.Argument(help="Show one model's versions.")] = "",
    version: Annotated[int, typer.Argument(help="Show one version's tables and plan.")] = 0,
) -> None:
    """Show what a store, a model or a version holds."""
    with one_line_errors():
        from embedserve.commands.inspect import inspect as run

        run(store, model, version)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns the errors that a person can mend into one line and exit status 1."""
    from embedserve_store.errors import StoreError

    try:
        yield
    except (StoreError, OSError, ValueError) as error:
        if isinstance(error, ValueError) and type(error) is not ValueError:
            raise
        typer.echo(f"embedserve: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo("embedserve: interrupted", err=True)
        raise typer.Exit(130) from None


def main() -> None:
    """The entry point of the `embedserve` command."""
    sys.exit(app())


if __name__ == "__main__":
    main()
