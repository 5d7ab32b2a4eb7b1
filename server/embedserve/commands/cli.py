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
from embedserve.commands.serve_options import cluster_options, serve_options, with_options
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


def _show_version(wanted: bool) -> None:
    if wanted:
        versions = {"embedserve": __version__, **installed_versions()}
        typer.echo("\n".join(" ".join(line) for line in versions.items()))
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        switch("--version", callback=_show_version, is_eager=True, help="Show the versions."),
    ] = False,
) -> None:
    """Serves the embedding tables of trained TorchRec models."""


COMMANDS: dict[str, Callable[..., Any]] = {
    "serve": with_options(serve, serve_options()),
    "cluster": with_options(cluster, cluster_options()),
    "demo": demo,
    "publish": publish,
    "describe": describe,
    "plan": plan,
    "inspect": inspect_store,
    "verify": verify,
    "diff": diff,
    "alias": alias,
    "rollback": rollback,
    "note": note,
    "history": history,
    "copy": copy,
    "prune": prune,
    "delete": delete,
    "admin": admin,
    "health": health,
    "shadow": shadow,
    "token": token,
}
DELTAS = "deltas"


def command_line(called: str = "") -> typer.Typer:
    """Returns the command line. If ``called`` names a command, it has only this one, because typer
    takes 60 ms to build all."""
    app = typer.Typer(
        name="embedserve",
        cls=Group,
        help="Serves the embedding tables of trained TorchRec models.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    names = {*COMMANDS, DELTAS}
    if called in names:
        names = {called}
    for name, command in COMMANDS.items():
        if name in names:
            app.command(name, cls=Command)(command)
    if DELTAS in names:
        app.add_typer(deltas, name=DELTAS)
    return app


app = command_line()
