"""Removes versions of a model. Never imports torch.

A version disappears in one step. In a folder, the version is moved aside before its files are
deleted; behind a URL, its manifest is deleted first. A version that a process has open in a folder
is kept (version_lock.py). The newest version is always kept, so that no number is reused. Behind a
URL no process has a version open, because processes open pulled copies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from embedserve_store.errors import StoreError, missing_version
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.record_event import record_event
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.transfer.file_check import MANIFEST
from embedserve_store.writing.version_lock import HeldError, exclusive_lock, remove_unheld


def remove_version(
    store: str | os.PathLike[str], model: str, version: int, *, who: str | None = None
) -> None:
    """Removes one version of ``model``.

    Args:
        who: author recorded in the history. Default: USER@HOST.

    Raises:
        StoreError: the version does not exist, is the newest, has an alias, or is open in a
            process. Also raised if the store cannot be read or written.
    """
    _remove(store, model, version)
    record_event(store, "delete", model, (version,), who=who)


def _remove(store: str | os.PathLike[str], model: str, version: int) -> None:
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
    who: str | None = None,
) -> Sequence[int]:
    """Removes all but the last ``keep`` versions of ``model``.

    Versions that an alias names are kept. In a folder, so are versions that a process has open,
    such as a server on this host.

    Args:
        keep: number of newest versions to keep, 1 or more.
        is_trial: removes nothing, and only returns the versions that would be removed.
        on_held: callback for each version that is kept only because it is open.
        who: author recorded in the history. Default: USER@HOST.

    Returns:
        The removed versions, ascending.

    Raises:
        StoreError: as in remove_version, except for open versions. Versions older than the one in
            the message are already removed.
        ValueError: keep is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}, expected 1 or more")
    models = ModelStore(store)
    named = {one.version for one in models.aliases(model).values()}
    old = [number for number in models.versions(model)[:-keep] if number not in named]
    removed: list[int] = []
    try:
        for number in old:
            try:
                if not is_trial:
                    _remove(store, model, number)
                elif not models.is_remote:
                    _check_unheld(Path(models.where) / model / str(number))
                removed.append(number)
            except HeldError:
                if on_held:
                    on_held(number)
    finally:
        if removed and not is_trial:
            record_event(store, "prune", model, removed, who=who)
    return removed


def _remove_local(models: ModelStore, folder: Path, version: int) -> None:
    def check() -> None:
        named = _names(models, folder.name, version)
        # The alias was set after the first check.
        if named:
            raise _named(models, folder.name, version, named)

    path = folder / str(version)
    try:
        remove_unheld(path, check)
    except OSError as error:
        raise StoreError(f"{path}: cannot be removed: {error.strerror}") from error


def _check_unheld(path: Path) -> None:
    try:
        with exclusive_lock(path):
            pass
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def _remove_remote(remote: RemoteFolder, path: str) -> None:
    names = sorted(remote.sizes(path), key=lambda name: name != MANIFEST)
    for name in names:
        remote.remove(f"{path}/{name}")
    remote.remove_folder(path)
