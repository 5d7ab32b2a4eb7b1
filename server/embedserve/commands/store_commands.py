"""Commands that inspect, name and remove the versions of a store.

Nothing heavy is imported at the top, so that --help responds immediately.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from embedserve.commands.switch import switch


def store_argument(text: str, envvar: str | None = None) -> Any:
    """Returns an argument that names a store, with ``text`` as its help. An empty name is an error:
    the current folder would be the store."""
    return typer.Argument(help=text, envvar=envvar, callback=check_store)


def check_store(store: str | None) -> str | None:
    """Returns ``store``; an error in the arguments if it is empty."""
    if store == "":
        raise typer.BadParameter("it is empty, expected a folder or a URL: is a variable unset?")
    return store


Store = Annotated[str, store_argument("Model store: a folder or a URL.")]
Model = Annotated[str, typer.Argument(help="Name of the model.")]
Version = Annotated[
    str | None, typer.Argument(help="Number or alias of a version. Default: the newest.")
]
CACHE = typer.Option(
    envvar="EMBEDSERVE_CACHE",
    help="Folder for versions pulled from a remote store. Default: ~/.cache/embedserve.",
)
Cache = Annotated[Path | None, CACHE]
DryRun = Annotated[bool, switch("--dry-run", help="Only show what would be removed.")]


def inspect_store(
    store: Store,
    model: Annotated[str, typer.Argument(help="Show the versions of this model.")] = "",
    version: Annotated[
        str,
        typer.Argument(help="Show the tables and plan of this version, a number or an alias."),
    ] = "",
) -> None:
    """Show the models of a store, the versions of a model, or the tables of a version."""
    from embedserve_store.commands.inspect import inspect as run

    run(store, model, version)


def verify(
    store: Store,
    model: Model,
    version: Version = None,
    part: Annotated[
        str,
        typer.Option(
            metavar="K/N",
            help="Check only the rows of this part of a version in N parts, from 0/N to N-1/N. "
            "From a remote store, read no others.",
        ),
    ] = "",
    cache: Cache = None,
) -> None:
    """Reread a version and check every byte against its checksums."""
    from embedserve_store.commands.verify import verify as run

    run(store, model, version, part, cache)


def diff(
    versions: Annotated[
        list[str],
        typer.Argument(
            help="STORE MODEL A B for two versions of a model, or STORE/MODEL/VERSION "
            "twice. A store is a folder or a URL, a version is a number or an "
            "alias.",
        ),
    ],
    cache: Cache = None,
) -> None:
    """Show what differs between two versions: tables, rows and how far they moved.

    Exits with status 1 if clients would notice: keys, their order, widths or tables, pooling, id
    rules or weights differ.
    """
    from embedserve_store.commands.diff import diff as run

    if not run(versions, cache):
        raise typer.Exit(1)


def alias(
    store: Store,
    model: Model,
    name: Annotated[str, typer.Argument(help="Name of an alias. Alone: show its history.")] = "",
    version: Annotated[
        str | None, typer.Argument(help="Version to move it to: a number or an alias.")
    ] = None,
    why: Annotated[str, typer.Option(help="Reason, stored with the change.")] = "",
    share: Annotated[
        float,
        typer.Option(
            help="Percent of the requests that name no version: servers that follow the "
            "alias answer these with this version, and the rest with the version of "
            "their first --model."
        ),
    ] = 0.0,
    shadow: Annotated[
        float,
        typer.Option(
            help="Percent of the other batches that these servers also look up in this "
            "version, to compare the results (embedserve shadow)."
        ),
    ] = 0.0,
    at_seq: Annotated[
        int | None,
        typer.Option(
            help="Delta of the version's line: servers that follow the alias apply no later "
            "ones, and take those back that they have applied. Default: every delta that comes."
        ),
    ] = None,
    remove: Annotated[bool, switch("--remove", help="Remove the alias.")] = False,
    new: Annotated[
        bool,
        switch("--new", help="Create the alias even if its name resembles an existing one."),
    ] = False,
    cache: Cache = None,
) -> None:
    """Show, move or remove a model's aliases: names for versions, such as stable."""
    from embedserve_store.commands.alias import change_alias, show_aliases

    is_change = remove or version is not None  # "" is an unset variable of a script
    if remove and version:
        raise ValueError(f"--remove takes no version, found {version!r}")
    changes = ("--why", why), ("--share", share), ("--shadow", shadow)
    for flag, given in (*changes, ("--at-seq", at_seq is not None)):
        if given and not is_change:
            raise ValueError(
                f"{flag} belongs to a change: name the version that the alias moves to"
            )
    if is_change:
        moved_to = None if remove else version
        change_alias(store, model, name, moved_to, why, share, shadow, at_seq, may_be_new=new)
    else:
        show_aliases(store, model, name, cache)


def rollback(
    store: Store,
    model: Model,
    to: Annotated[
        str | None,
        typer.Option(help="Number or alias of a version. Default: the previous version."),
    ] = None,
    alias: Annotated[str, typer.Option(help="Alias to move.")] = "stable",
    why: Annotated[str, typer.Option(help="Reason, stored with each change.")] = "",
) -> None:
    """Move an alias back to the previous version, and remove aliases with a share or a shadow."""
    from embedserve_store.commands.alias import roll_back_alias

    roll_back_alias(store, model, alias, to, why)


def note(
    store: Store,
    model: Model,
    version: Annotated[
        str, typer.Argument(help="Number of the version, or an alias that names it now.")
    ],
    text: Annotated[str, typer.Argument(help="Text that inspect shows with this version.")],
) -> None:
    """Store a note beside a version, which itself never changes."""
    from embedserve_store.commands.note import note as run

    run(store, model, version, text)


def history(
    store: Store,
    model: Annotated[str, typer.Argument(help="Show only the changes of this model.")] = "",
    last: Annotated[int, typer.Option(help="Number of changes to show.", min=1)] = 50,
    json: Annotated[bool, switch("--json", help="Print a JSON object in each line.")] = False,
    cache: Cache = None,
) -> None:
    """Show who changed a store, when, from where and how, the latest change first.

    Commands record USER@HOST as the author, or EMBEDSERVE_BY if that variable is set.
    """
    from embedserve_store.commands.history import history as run

    run(store, model, last, json, cache)


def copy(
    source: Annotated[str, store_argument("Store to copy from: a folder or a URL.")],
    target: Annotated[
        str, store_argument("Store to copy to: a folder, created if missing, or a URL.")
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            help="MODEL for all its versions, MODEL@VERSION or MODEL@ALIAS for one. Default: all "
            "versions of all models."
        ),
    ] = None,
    aliases: Annotated[
        bool, switch("--aliases", help="Also copy the aliases, with their history.")
    ] = False,
    no_deltas: Annotated[
        bool, switch("--no-deltas", help="Leave out the deltas after the versions.")
    ] = False,
) -> None:
    """Copy versions with their notes and deltas to another store, and check every byte on the way.

    Versions keep their numbers. A version appears whole or not at all, and a version that the
    target has is left alone. If a copy was interrupted, start it again: it continues.
    """
    from embedserve_store.commands.copy import copy as run

    run(source, target, model, aliases, not no_deltas)


def prune(
    store: Store,
    model: Model,
    keep: Annotated[int, typer.Option(help="Number of newest versions to keep.", min=1)],
    dry_run: DryRun = False,
) -> None:
    """Remove old versions of a model, except those that an alias names or a server has open."""
    from embedserve_store.commands.prune import prune as run

    run(store, model, keep, dry_run)


def delete(
    store: Store,
    model: Model,
    version: Annotated[int, typer.Argument(help="Number of the version.")],
) -> None:
    """Remove one version of a model, unless it is the newest, has an alias or is open."""
    from embedserve_store.commands.delete import delete as run

    run(store, model, version)
