"""Moves an alias of a model to another version, or removes it. Never imports torch.

A change is a file that is added (added_file.py): it appears whole or not at all.
"""

from __future__ import annotations

import os
from dataclasses import replace
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
