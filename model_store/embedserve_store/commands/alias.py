"""`embedserve alias` and `rollback`: show, move, remove and roll back a model's aliases."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from embedserve_store import Alias, ModelStore, StoreError, roll_back, set_alias
from embedserve_store.terminal.aligned_columns import grid, plain, show, write
from embedserve_store.terminal.console import say
from embedserve_store.terminal.stores import opened

ALIKE = 0.7
"""Similarity ratio (difflib) of two names from which one may be a typo of the other."""


def show_aliases(store: str, model: str, name: str, cache: Path | None) -> None:
    """Prints the aliases of ``model``, or the history of one alias, newest change first."""
    with opened(store, cache) as models:
        if name:
            _show(f"alias {name} of {model}", models.alias_history(model, name))
        else:
            _show(f"aliases of {model}", models.aliases(model).values())


def change_alias(
    store: str,
    model: str,
    name: str,
    version: str | None,
    why: str,
    share: float,
    shadow: float,
    at_seq: int | None,
    *,
    may_be_new: bool,
) -> None:
    """Moves an alias to ``version``, or removes it if ``version`` is None. The other arguments are
    those of set_alias.

    Raises:
        StoreError: the alias is new, resembles another, and ``may_be_new`` is False.
    """
    models = ModelStore(store)
    before = models.aliases(model)
    others = ", ".join(one for one in before if one != name)
    is_new = version is not None and name not in before
    alike = get_close_matches(name, before, 1, ALIKE)
    if is_new and alike and not may_be_new:
        raise StoreError(
            f"{model} has no alias {name!r}, did you mean {alike[0]!r}? Aliases are {others}; "
            "--new makes another"
        )
    change = set_alias(
        store, model, name, version, why=why, share=share, shadow=shadow, at_seq=at_seq
    )
    now = f"version {change.version}{settings_of(change)}"
    if change.version is None:
        say(f"{model}: {name} is no alias any more")
    elif is_new:
        beside = f" beside {others}" if others else ""
        say(f"{model}: {name} is {now}: a new alias{beside}")
    else:
        was = f"version {before[name].version}{settings_of(before[name])}"
        say(f"{model}: {name} is {now}: it was {was}")
    for one in models.aliases(model).values():
        if one.name != name and (one.share or one.shadow):
            say(f"{model}: {one.name} still is version {one.version}{settings_of(one)}")


def roll_back_alias(store: str, model: str, name: str, to: str | None, why: str) -> None:
    """Moves an alias back, removes the aliases with a share or a shadow, and reports both."""
    done = roll_back(store, model, name, to=to, why=why)
    for one in done.removed:
        was = f"it was version {one.version}{settings_of(one)}"
        say(f"{model}: {one.name} is no alias any more: {was}")
    after, before = (f"version {o.version}{settings_of(o)}" for o in (done.after, done.before))
    say(f"{model}: {name} is {after}: it was {before}")


def settings_of(alias: Alias) -> str:
    """Returns delta, share and shadow of an alias, to follow its version."""
    delta = "" if alias.at_seq is None else f" at delta {alias.at_seq}"
    share = f", with a share of {alias.share:g} %" if alias.share else ""
    return delta + share + (f", in the shadow of {alias.shadow:g} %" if alias.shadow else "")


def _show(title: str, aliases: Iterable[Alias]) -> None:
    table = grid("alias", "version", "when", "who", "why", numbers=("version",))
    for one in aliases:
        version = "removed" if one.version is None else f"{one.version}{settings_of(one)}"
        table.add_row(*map(plain, (one.name, version, one.when, one.who, one.why)))
    if table.row_count:
        show(title, table)
    else:
        write(f"{title}: none")
