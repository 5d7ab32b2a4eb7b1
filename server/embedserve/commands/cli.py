"""The command line: registers all commands, in the order in which --help lists them.

Nothing heavy is imported at the top, so that --help responds immediately. A user's error is one
line on stderr and exit status 1, without a traceback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from embedserve import __version__
from embedserve.commands.deltas_commands import deltas
from embedserve.commands.installation import installed_versions
from embedserve.commands.publish_commands import demo, describe, plan, publish
from embedserve.commands.serve_options import with_settings_as_options
from embedserve.commands.server_commands import admin, cluster, health, serve, shadow, token
from embedserve.commands.store_commands import (
    alias,
    copy,
    delete,
    diff,
    history,
    inspect_store,
    note,
    prune,
    rollback,
    verify,
)
from embedserve.commands.switch import Command, Group, switch

app = typer.Typer(
    name="embedserve",
    cls=Group,
    help="Serves the embedding tables of trained TorchRec models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        versions = {"embedserve": __version__, **installed_versions()}
        typer.echo("\n".join(" ".join(line) for line in versions.items()))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        switch("--version", callback=_show_version, is_eager=True, help="Show the versions."),
    ] = False,
) -> None:
    """Serves the embedding tables of trained TorchRec models."""


COMMANDS: tuple[Callable[..., Any], ...] = (
    with_settings_as_options(serve),
    cluster,
    demo,
    publish,
    describe,
    plan,
    inspect_store,
    verify,
    diff,
    alias,
    rollback,
    note,
    history,
    copy,
    prune,
    delete,
    admin,
    health,
    shadow,
    token,
)
for command in COMMANDS:
    name = "inspect" if command is inspect_store else None
    app.command(name, cls=Command)(command)
app.add_typer(deltas, name="deltas")
