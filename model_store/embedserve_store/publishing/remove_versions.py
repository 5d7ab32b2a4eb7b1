"""Removes versions of a model that nobody needs any more. Never imports torch.

A version goes in one step: a folder is moved aside before it is emptied, behind a URL its manifest
goes first. What somebody has open in a folder stays (hold.py), and so does the newest, so that no
number comes again. Behind a URL nobody has a version open: it was pulled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from embedserve_store.errors import StoreError, missing_version
from embedserve_store.model_store import ModelStore
from embedserve_store.remote.pull import MANIFEST
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.writing.version_lock import HeldError, remove_unheld, unheld


def remove_version(store: str | os.PathLike[str], model: str, version: int) -> None:
    """Removes one version of ``model``.

    Raises:
        StoreError: there is no such version, it is the newest, an alias names it, somebody has it
            open, or the store cannot be read or written.
    """
    models = ModelStore(store)
    versions = models.versions(model)
    where = f"{models.where}/{model}"
    if version not in versions:
        raise missing_version(where, version, versions)
    if version == versions[-1]:
        raise StoreError(f"{where}: version {version} is the newest, which stays")
    if named := _names(models, model, version):
        raise _named(models, model, version, named)
    if models.is_remote:
        _remove_remote(RemoteFolder(models.where), f"{model}/{version}")
    else:
        _remove_local(models, Path(models.where) / model, version)


def _names(models: ModelStore, model: str, version: int) -> list[str]:
    return [name for name, one in models.aliases(model).items() if one.version == version]


def _named(models: ModelStore, model: str, version: int, names: Sequence[str]) -> StoreError:
    return StoreError(
        f"{models.where}/{model}: version {version} is what alias {', '.join(names)} names"
    )


def prune(
    store: str | os.PathLike[str],
    model: str,
    keep: int,
    *,
    is_trial: bool = False,
    on_held: Callable[[int], None] | None = None,
) -> Sequence[int]:
    """Removes all versions of ``model`` but the last ``keep``, those that an alias names, and those
    that somebody has open, such as a server on this host.

    Args:
        keep: 1 or more.
        is_trial: only say which would be removed.
        on_held: called with each version that stays only because it is open.

    Returns:
        the versions that were removed, ascending.

    Raises:
        StoreError: as remove_version, but for what is open; versions before the one that it names
            are removed.
        ValueError: keep is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}, expected 1 or more")
    models = ModelStore(store)
    named = {one.version for one in models.aliases(model).values()}
    old = [number for number in models.versions(model)[:-keep] if number not in named]
    removed = []
    for number in old:
        try:
            if not is_trial:
                remove_version(store, model, number)
            elif not models.is_remote:
                _check_unheld(Path(models.where) / model / str(number))
            removed.append(number)
        except HeldError:
            if on_held:
                on_held(number)
    return removed


def _remove_local(models: ModelStore, folder: Path, version: int) -> None:
    def check() -> None:
        named = _names(models, folder.name, version)
        if named:  # since it was looked
            raise _named(models, folder.name, version, named)

    path = folder / str(version)
    try:
        remove_unheld(path, check)
    except OSError as error:
        raise StoreError(f"{path}: cannot be removed: {error.strerror}") from error


def _check_unheld(path: Path) -> None:
    try:
        with unheld(path):
            pass
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def _remove_remote(remote: RemoteFolder, path: str) -> None:
    names = sorted(remote.sizes(path), key=lambda name: name != MANIFEST)
    for name in names:
        remote.remove(f"{path}/{name}")
    remote.remove_folder(path)
