"""`embedserve alias`: shows the aliases of a model and their history, moves and removes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from embedserve.terminal.aligned_columns import grid, plain, show, write
from embedserve.terminal.console import say
from embedserve.terminal.stores import opened
from embedserve_store import Alias, set_alias


def show_aliases(store: str, model: str, name: str, cache: Path | None) -> None:
    """Prints the aliases of ``model``, or the history of one, the last change first.

    Raises:
        StoreError: there is no such model, or the store cannot be read.
    """
    with opened(store, cache) as models:
        if name:
            _show(f"alias {name} of {model}", models.alias_history(model, name))
        else:
            _show(f"aliases of {model}", models.aliases(model).values())


def change_alias(
    store: str, model: str, name: str, version: str | None, why: str, share: float, shadow: float
) -> None:
    """Moves an alias to ``version``, or removes it where that is None; ``share`` and ``shadow`` are
    in percent.

    Raises:
        StoreError: as set_alias.
    """
    change = set_alias(store, model, name, version, why=why, share=share, shadow=shadow)
    if change.version is None:
        say(f"{model}: {name} is no alias any more")
    else:
        say(f"{model}: {name} is version {change.version}{_shared(change)}")


def _shared(alias: Alias) -> str:
    share = f", with a share of {alias.share:g} %" if alias.share else ""
    return share + (f", in the shadow of {alias.shadow:g} %" if alias.shadow else "")


def _show(title: str, aliases: Iterable[Alias]) -> None:
    table = grid("alias", "version", "when", "who", "why", numbers=("version",))
    for one in aliases:
        version = "removed" if one.version is None else f"{one.version}{_shared(one)}"
        table.add_row(*map(plain, (one.name, version, one.when, one.who, one.why)))
    if table.row_count:
        show(title, table)
    else:
        write(f"{title}: none")
