"""Moves an alias of a model to another version, or back, or removes it. Never imports torch.

A change is a file that is added (added_file.py): it appears whole or not at all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from embedserve_store.errors import StoreError
from embedserve_store.format.alias import Alias, check_name, file_name
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.added_file import ATTEMPTS, check_texts, user, writer


def set_alias(
    store: str | os.PathLike[str],
    model: str,
    name: str,
    version: int | str | None,
    *,
    why: str = "",
    who: str | None = None,
    share: float = 0.0,
    shadow: float = 0.0,
) -> Alias:
    """Has the alias ``name`` of ``model`` mean ``version`` from now on; returns the change.

    Args:
        store: a folder or a URL.
        version: a number, or another alias for what it means now; None removes the alias.
        why, who: kept with the change; who is USER@HOST unless told.
        share: of the requests that name the model and no version, in percent: what servers that
            follow the alias answer with it, where another version answers the rest.
        shadow: of that other version's batches, in percent: what they look up in this one, too, and
            compare.

    Raises:
        StoreError: the name cannot be an alias, there is no such version or no alias to remove,
            ``share`` or ``shadow`` is no percentage, or the store cannot be read or written.
    """
    check_name(name)
    for field, percent in (("share", share), ("shadow", shadow)):
        if not 0.0 <= percent <= 100.0:
            raise StoreError(f"{field} is {percent:g}, expected a percentage from 0 to 100")
    who = user() if who is None else who
    check_texts(why=why, who=who)
    models = ModelStore(store)
    number = None if version is None else models.manifest(model, version).version
    if number is None and name not in models.aliases(model):
        raise StoreError(f"{models.where}/{model}: no alias {name!r} to remove")
    when = datetime.now(UTC).isoformat(timespec="seconds")
    change = Alias(model, name, 0, number, who, when, why, float(share), float(shadow))
    write = writer(models.where)
    for _ in range(ATTEMPTS):
        numbers = models.alias_changes(model).get(name, [0])
        change = replace(change, number=max(numbers) + 1)
        if write(f"{model}/{file_name(name, change.number)}", change.to_bytes()):
            _check_there(models, change)
            return change
    raise StoreError(f"{models.where}/{model}: others changed alias {name!r} {ATTEMPTS} times")


def _check_there(models: ModelStore, change: Alias) -> None:
    """Who removes versions may not have seen the change yet."""
    if change.version is not None and change.version not in models.versions(change.model):
        raise StoreError(
            f"{models.where}/{change.model}: version {change.version} was removed meanwhile, and "
            f"alias {change.name!r} names it: set it to another"
        )


@dataclass(frozen=True)
class Rollback:
    """The changes that roll_back made.

    Attributes:
        before, after: the alias that was rolled back, as it was and as it is.
        removed: aliases that had a share of the requests or a shadow, as they were.
    """

    before: Alias
    after: Alias
    removed: tuple[Alias, ...]


def roll_back(
    store: str | os.PathLike[str],
    model: str,
    name: str = "stable",
    *,
    to: int | str | None = None,
    why: str = "",
    who: str | None = None,
) -> Rollback:
    """Moves the alias ``name`` back to the version that it meant before, and removes every other
    alias of ``model`` that has a share of the requests, or a shadow, with another version.

    Rolling back again goes back further. What other versions answer is taken away first, so that
    a call that fails half-way can be made again.

    Args:
        store: a folder or a URL.
        to: a number, or another alias for the version that it means now; None: the one before.
        why, who: kept with each change, as by set_alias.

    Raises:
        StoreError: there is no such alias, it meant no other version before, or that version is
            not there any more; or as set_alias.
    """
    models = ModelStore(store)
    now = models.aliases(model)
    if name not in now:
        there = ", ".join(now) or "none"
        raise StoreError(f"{models.where}/{model}: no alias {name!r}, aliases are {there}")
    number = _before(models, model, name) if to is None else models.manifest(model, to).version
    if number not in models.versions(model):
        there = ", ".join(map(str, models.versions(model)))
        raise StoreError(
            f"{models.where}/{model}: {name} was version {number} before, which does not exist any "
            f"more; versions are {there}"
        )
    others = [one for other, one in now.items() if other != name and one.version != number]
    removed = tuple(one for one in others if one.share or one.shadow)
    for one in removed:
        set_alias(store, model, one.name, None, why=why, who=who)
    return Rollback(now[name], set_alias(store, model, name, number, why=why, who=who), removed)


def _before(models: ModelStore, model: str, name: str) -> int:
    """Returns the version that an alias meant before the one that it means now."""
    past: list[int] = []
    for change in reversed(models.alias_history(model, name)):
        if change.version in past:  # it went back
            del past[past.index(change.version) :]
        if change.version is not None:
            past.append(change.version)
    if len(past) == 1:
        raise StoreError(
            f"{models.where}/{model}: {name} was no other version than {past[0]} before: say which"
        )
    return past[-2]
