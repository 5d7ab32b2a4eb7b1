"""Commands for the deltas of a model: rows that changed since a version was published.

Nothing heavy is imported at the top, so that --help responds immediately.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from embedserve.commands.store_commands import Cache, DryRun, Model, Store
from embedserve.commands.switch import Command, Group, switch

DEFAULT = "list"

LineVersion = Annotated[
    str | None,
    typer.Option(help="Number or alias of the version before the deltas. Default: the newest."),
]
PublicKey = Annotated[
    Path | None,
    typer.Option(
        "--key",
        envvar="EMBEDSERVE_DELTA_KEY",
        help="PEM file with Ed25519 public keys; every delta must be signed by one of them. "
        "Default: signatures are not verified.",
    ),
]


class DeltasGroup(Group):
    """A group whose command ``list`` runs if the first argument names no command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            args = [DEFAULT, *args]
        return super().resolve_command(ctx, args)


deltas = typer.Typer(
    cls=DeltasGroup,
    help="List, verify, undo, compact or prune the deltas that training pushed: rows that changed "
    "since a version was published.",
    no_args_is_help=True,
)


@deltas.command(DEFAULT, cls=Command)
def list_deltas(
    store: Store,
    model: Model,
    seq: Annotated[int | None, typer.Argument(help="Show the tables of this delta.")] = None,
    version: LineVersion = None,
    last: Annotated[int, typer.Option(help="Number of deltas to list; 0 lists all.", min=0)] = 20,
) -> None:
    """List the last deltas, or the tables of one delta. The word list may be left out."""
    from embedserve_store.commands.deltas import list_deltas as run

    run(store, model, seq, version, last)


@deltas.command(cls=Command)
def verify(store: Store, model: Model, version: LineVersion = None, key: PublicKey = None) -> None:
    """Read every byte of the deltas, and check that each continues the one before it."""
    from embedserve_store.commands.deltas import verify_deltas as run

    run(store, model, version, key)


@deltas.command(cls=Command)
def undo(
    store: Store,
    model: Model,
    to: Annotated[int, typer.Option(help="Last delta to keep; 0 keeps the version alone.", min=0)],
    why: Annotated[str, typer.Option(help="Reason for the history, the log and the training job.")],
    version: Annotated[
        str | None,
        typer.Option(
            help="Number or alias of the version whose line is meant. Default: the newest, if no "
            "alias names a version of another line."
        ),
    ] = None,
    alone: Annotated[
        bool,
        switch(
            "--alone",
            help="Confirm that no training job pushes meanwhile. Required if the store does not "
            "refuse a second file of one name.",
        ),
    ] = False,
    key: Annotated[
        Path | None,
        typer.Option(
            envvar="EMBEDSERVE_DELTA_SIGNING_KEY",
            help="PEM file with the Ed25519 private key that signs the undo. Required where "
            "servers have --delta-key.",
        ),
    ] = None,
    notify: Annotated[
        str | None,
        typer.Option(
            envvar="EMBEDSERVE_DELTA_NOTIFY",
            help="Broker that notifies servers of the undo, as --delta-notify of serve.",
        ),
    ] = None,
) -> None:
    """Take the last deltas back: servers return to the rows after an earlier delta."""
    from embedserve_store.commands.deltas import undo as run

    run(store, model, to, why, version, alone, key, notify)


@deltas.command(cls=Command)
def compact(
    store: Store,
    model: Model,
    version: LineVersion = None,
    seq: Annotated[
        int | None, typer.Option(help="Last delta to include. Default: the last one.", min=1)
    ] = None,
    cache: Cache = None,
    key: PublicKey = None,
) -> None:
    """Publish a version and the deltas after it as the next version."""
    from embedserve_store.commands.deltas import compact as run

    run(store, model, version, seq, cache, key)


@deltas.command(cls=Command)
def prune(
    store: Store,
    model: Model,
    keep_hours: Annotated[
        float, typer.Option(help="Keep all deltas that are younger.", min=0)
    ] = 24.0,
    dry_run: DryRun = False,
) -> None:
    """Remove the deltas that no stored version needs, the oldest first."""
    from embedserve_store.commands.deltas import prune as run

    run(store, model, keep_hours, dry_run)
