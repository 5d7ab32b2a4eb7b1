"""Sets, rolls back and removes the aliases of a model. Never imports torch.

Each change adds a file (added_file.py), which appears whole or not at all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from embedserve_store.errors import MissingFileError, StoreError
from embedserve_store.format.alias import ALIASES_FOLDER, Alias, alias_path, check_name
from embedserve_store.format.delta_manifest import DELTA_SEQ_MAX, position_of
from embedserve_store.format.text_limit import check_texts
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.added_file import ATTEMPTS, now, user, writer
from embedserve_store.publishing.record_event import record_event


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
    at_seq: int | None = None,
) -> Alias:
    """Points the alias ``name`` of ``model`` to ``version``, and returns the change.

    Args:
        store: a folder or a URL.
        version: a version number, or another alias, whose version and delta are taken as they are
            now. None removes the alias.
        why, who: reason and author, stored with the change. The default author is USER@HOST.
        share: percentage of the requests that name the model without a version. Servers route these
            requests to this alias. The share applies to servers that follow the alias; another
            version serves the rest.
        shadow: percentage of that other version's batches that this version also looks up, so that
            servers compare the results.
        at_seq: last delta of the version's line whose rows servers use; for those of the version
            itself, the last delta that it has. Default: that of another alias, else every delta
            that comes.

    Raises:
        StoreError: the name cannot be an alias, the version, the delta or the alias to remove does
            not exist, or ``share`` or ``shadow`` is not a percentage. Also raised if the store
            cannot be read or written.
    """
    check_name(name)
    for field, percent in (("share", share), ("shadow", shadow)):
        if not 0.0 <= percent <= 100.0:
            raise StoreError(f"{field} is {percent:g}, expected a percentage from 0 to 100")
    who = user() if who is None else who
    check_texts(why=why, who=who)
    models = ModelStore(store)
    number, other = (None, None) if version is None else _named(models, model, version)
    if number is None and name not in models.aliases(model):
        raise StoreError(f"{models.where}/{model}: no alias {name!r} to remove")
    if at_seq is None and other is not None:
        at_seq = other.at_seq
    if at_seq is not None:
        _check_delta(models, model, number, at_seq)
    when = now()
    change = Alias(model, name, 0, number, who, when, why, float(share), float(shadow), at_seq)
    write = writer(models.where, f"{model}/{ALIASES_FOLDER}")
    for _ in range(ATTEMPTS):
        numbers = models.alias_changes(model).get(name, [0])
        change = replace(change, change_number=max(numbers) + 1)
        if write(f"{model}/{alias_path(name, change.change_number)}", change.to_bytes()):
            _check_there(models, change)
            versions = () if number is None else (number,)
            what = " removed" if number is None else "" if at_seq is None else f" at delta {at_seq}"
            detail = f"{name}{what}{why and f': {why}'}"
            record_event(store, "alias", model, versions, who=who, detail=detail)
            return change
    raise StoreError(f"{models.where}/{model}: others changed alias {name!r} {ATTEMPTS} times")


def _named(models: ModelStore, model: str, version: int | str) -> tuple[int, Alias | None]:
    """Returns the number of a version, and the alias if ``version`` is one."""
    alias = models.alias_named(model, version)
    number = version if alias is None else alias.version
    return models.manifest(model, number).version, alias


def _check_delta(models: ModelStore, model: str, number: int | None, at_seq: int) -> None:
    """Raises StoreError unless a version can be served as it is after delta ``at_seq``."""
    if number is None:
        raise StoreError(f"at_seq is {at_seq}: an alias that is removed has no delta")
    start, where = position_of(models.manifest(model, number)), f"{models.where}/{model}"
    if not start.seq <= at_seq <= DELTA_SEQ_MAX:
        raise StoreError(
            f"{where}: at_seq is {at_seq}, expected {start.seq} to {DELTA_SEQ_MAX}: version "
            f"{number} has the deltas up to {start.seq} in its own rows"
        )
    if at_seq > start.seq:
        try:
            models.delta(model, start.line, at_seq)
        except MissingFileError:
            raise StoreError(
                f"{where}: at_seq is {at_seq}, and line {start.line} has no such delta "
                "(embedserve deltas)"
            ) from None


def _check_there(models: ModelStore, change: Alias) -> None:
    """Raises StoreError if the version was removed while the alias was set.

    A process that removes versions may not have seen the change yet.
    """
    if change.version is not None and change.version not in models.versions(change.model):
        raise StoreError(
            f"{models.where}/{change.model}: version {change.version} was removed meanwhile, and "
            f"alias {change.name!r} names it: set it to another"
        )


@dataclass(frozen=True)
class Rollback:
    """The changes that roll_back made.

    Attributes:
        before, after: the alias that was rolled back, before and after.
        removed: aliases that had a share of the requests or a shadow, before their removal.
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
    """Points the alias ``name`` back to its previous version, at the delta that it had there.

    Also removes every other alias of ``model`` that gives another version, or other deltas of this
    one, a share of the requests or a shadow. These are removed first, so that a call that fails
    half-way can be repeated. Another rollback goes back one version further.

    Args:
        store: a folder or a URL.
        to: a version number, or another alias, as in set_alias. A number comes with the delta that
            the alias last had there. None: the previous version.
        why, who: reason and author, stored with each change, as in set_alias.

    Raises:
        StoreError: the alias does not exist, never named another version, or its previous version
            or delta no longer exists; or in the cases of set_alias.
    """
    models = ModelStore(store)
    aliases = models.aliases(model)
    if name not in aliases:
        there = ", ".join(aliases) or "none"
        raise StoreError(f"{models.where}/{model}: no alias {name!r}, aliases are {there}")
    past, at_seqs = _past(models, model, name)
    if to is None and len(past) == 1:
        raise StoreError(
            f"{models.where}/{model}: {name} was no other version than {past[0]} before: say which "
            "(--to)"
        )
    if to is None:
        number, at_seq = past[-2], at_seqs[past[-2]]
    else:
        number, other = _named(models, model, to)
        at_seq = at_seqs.get(number) if other is None else other.at_seq
    if number not in models.versions(model):
        there = ", ".join(map(str, models.versions(model)))
        raise StoreError(
            f"{models.where}/{model}: {name} was version {number} before, which does not exist any "
            f"more; versions are {there}"
        )
    if at_seq is not None:
        _check_delta(models, model, number, at_seq)
    rows = (number, at_seq)
    others = [
        one for one in aliases.values() if one.name != name and (one.version, one.at_seq) != rows
    ]
    removed = tuple(one for one in others if one.share or one.shadow)
    for one in removed:
        set_alias(store, model, one.name, None, why=why, who=who)
    after = set_alias(store, model, name, number, why=why, who=who, at_seq=at_seq)
    return Rollback(aliases[name], after, removed)


def _past(models: ModelStore, model: str, name: str) -> tuple[list[int], dict[int, int | None]]:
    """Returns the versions that an alias has named, the current one last, and the delta that it
    last had at each."""
    past: list[int] = []
    at_seqs: dict[int, int | None] = {}
    for change in reversed(models.alias_history(model, name)):
        if change.version in past:  # the alias was rolled back
            del past[past.index(change.version) :]
        if change.version is not None:
            past.append(change.version)
            at_seqs[change.version] = change.at_seq
    return past, at_seqs
