"""Removes versions of a model that nobody needs any more. Never imports torch.

A version goes in one step: a folder is moved aside before it is emptied, behind a URL its manifest
goes first. Servers that have it mapped answer on. The newest stays, so that no number comes again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from embedserve_store.errors import StoreError
from embedserve_store.model_store import ModelStore
from embedserve_store.remote.pull import MANIFEST
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.writing.staging import staging_folder, sync


def remove_version(store: str | os.PathLike[str], model: str, version: int) -> None:
    """Removes one version of ``model``.

    Raises:
        StoreError: there is no such version, it is the newest, an alias names it, or the store
            cannot be read or written.
    """
    models = ModelStore(store)
    versions = models.versions(model)
    where = f"{models.where}/{model}"
    if version not in versions:
        raise StoreError(f"{where}: version {version} does not exist, there are {versions}")
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
    store: str | os.PathLike[str], model: str, keep: int, *, is_trial: bool = False
) -> Sequence[int]:
    """Removes all versions of ``model`` but the last ``keep`` and those that an alias names.

    Args:
        keep: 1 or more.
        is_trial: only say which would be removed.

    Returns:
        the versions that were removed, ascending.

    Raises:
        StoreError: as remove_version; versions before the one that it names are removed.
        ValueError: keep is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}, expected 1 or more")
    models = ModelStore(store)
    named = {one.version for one in models.aliases(model).values()}
    old = [number for number in models.versions(model)[:-keep] if number not in named]
    if not is_trial:
        for number in old:
            remove_version(store, model, number)
    return old


def _remove_local(models: ModelStore, folder: Path, version: int) -> None:
    path = folder / str(version)
    try:
        with staging_folder(folder) as aside:
            os.rename(path, aside / str(version))
            sync(folder)
            named = _names(models, folder.name, version)
            if named:  # since it was looked
                os.rename(aside / str(version), path)
                raise _named(models, folder.name, version, named)
    except OSError as error:
        raise StoreError(f"{path}: cannot be removed: {error.strerror}") from error


def _remove_remote(remote: RemoteFolder, path: str) -> None:
    names = sorted(remote.sizes(path), key=lambda name: name != MANIFEST)
    for name in names:
        remote.remove(f"{path}/{name}")
    remote.remove_folder(path)
