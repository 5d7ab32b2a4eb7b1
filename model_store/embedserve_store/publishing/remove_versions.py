"""Removes versions of a model. Never imports torch.

A version disappears in one step. In a folder, the version is moved aside before its files are
deleted; behind a URL, its manifest is deleted first. If an alias was set meanwhile, the version
comes back. A version that a process has open in a folder is kept (version_lock.py). The newest
version is always kept, so that no number is reused. Behind a URL no process has a version open,
because processes open pulled copies.

The history has a removal as soon as readers do not see the version any more. If the store stops
responding then, files without a manifest are left behind, and remove_version removes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from embedserve_store.errors import StoreError, UnreachableError, missing_version, reading
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.record_event import record_event
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.transfer.file_check import MANIFEST
from embedserve_store.transfer.stored_version import SMALL_FILE_BYTES_MAX
from embedserve_store.writing.version_lock import VersionInUseError, exclusive_lock, remove_unused


def remove_version(
    store: str | os.PathLike[str], model: str, version: int, *, who: str | None = None
) -> None:
    """Removes one version of ``model``.

    Behind a URL, also removes what an interrupted removal has left of a version below the newest.
    No upload or copy under this number may run meanwhile.

    Args:
        who: author recorded in the history. Default: USER@HOST.

    Raises:
        StoreError: the version does not exist, is the newest, has an alias, or is open in a
            process. Also raised if the store cannot be read or written.
    """

    record = partial(record_event, store, "delete", model, (version,), who=who)
    _remove(store, model, version, record, with_leftovers=True)


def _remove(
    store: str | os.PathLike[str],
    model: str,
    version: int,
    on_gone: Callable[[], None],
    *,
    with_leftovers: bool = False,
) -> None:
    """Removes a version, and calls ``on_gone`` once readers do not see it any more.

    Args:
        with_leftovers: whether to remove files without a manifest, too, which an interrupted
            removal behind a URL has left.
    """
    models = ModelStore(store)
    versions = models.versions(model)
    where, path = f"{models.where}/{model}", f"{model}/{version}"
    remote = RemoteFolder(models.where) if models.is_remote else None
    may_be_left = with_leftovers and version < max(versions, default=0)
    if version not in versions and not (may_be_left and remote and remote.sizes(path)):
        raise missing_version(where, version, versions)
    if version == versions[-1]:
        raise StoreError(f"{where}: version {version} is the newest, which stays")
    _check_unnamed(models, model, version)
    if remote is not None:
        _remove_remote(models, remote, model, version, on_gone)
    else:
        _remove_local(models, Path(models.where) / model, version, on_gone)


def _check_unnamed(models: ModelStore, model: str, version: int) -> None:
    """Raises StoreError if an alias names the version."""
    names = [name for name, one in models.aliases(model).items() if one.version == version]
    if names:
        raise StoreError(
            f"{models.where}/{model}: version {version} is what alias {', '.join(names)} names"
        )


def prune(
    store: str | os.PathLike[str],
    model: str,
    keep: int,
    *,
    is_trial: bool = False,
    on_in_use: Callable[[int], None] | None = None,
    who: str | None = None,
) -> Sequence[int]:
    """Removes all but the last ``keep`` versions of ``model``.

    Versions that an alias names are kept. In a folder, so are versions that a process has open,
    such as a server on this host. Versions that another process removes meanwhile are skipped.

    Args:
        keep: number of newest versions to keep, 1 or more.
        is_trial: removes nothing, and only returns the versions that would be removed.
        on_in_use: callback for each version that is kept only because it is open.
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
                    _remove(store, model, number, partial(removed.append, number))
                    continue
                if not models.is_remote:
                    _check_unused(Path(models.where) / model / str(number))
                removed.append(number)
            except VersionInUseError:
                if on_in_use:
                    on_in_use(number)
            except StoreError:
                # Another process may have removed the version meanwhile.
                if number in removed or number in models.versions(model):
                    raise
    finally:
        if removed and not is_trial:
            record_event(store, "prune", model, removed, who=who)
    return removed


def _remove_local(
    models: ModelStore, folder: Path, version: int, on_gone: Callable[[], None]
) -> None:
    path = folder / str(version)
    try:
        # The check is repeated, because an alias may have been set after the first one.
        remove_unused(path, partial(_check_unnamed, models, folder.name, version), on_gone)
    except OSError as error:
        raise StoreError(f"{path}: cannot be removed: {error.strerror}") from error


def _check_unused(path: Path) -> None:
    with reading(path), exclusive_lock(path):
        pass


def _remove_remote(
    models: ModelStore, remote: RemoteFolder, model: str, version: int, on_gone: Callable[[], None]
) -> None:
    path = f"{model}/{version}"
    sizes = remote.sizes(path)
    nbytes = sizes.pop(MANIFEST, None)
    if nbytes is not None and nbytes > SMALL_FILE_BYTES_MAX:
        # Nobody can read this manifest, so no alias is set to the version meanwhile.
        _remove_manifest(remote, path)
    elif nbytes is not None:
        manifest = remote.read(f"{path}/{MANIFEST}", nbytes)
        _remove_manifest(remote, path)
        try:
            # The check is repeated, because an alias may have been set after the first one.
            _check_unnamed(models, model, version)
        except BaseException:
            try:
                remote.write(f"{path}/{MANIFEST}", manifest)
            except UnreachableError as error:
                on_gone()
                raise _half_removed(model, version, error) from error
            raise
    on_gone()
    try:
        for name in sorted(sizes):
            remote.remove(f"{path}/{name}")
    except UnreachableError as error:
        raise _half_removed(model, version, error) from error
    remote.remove_folder(path)


def _remove_manifest(remote: RemoteFolder, path: str) -> None:
    name = f"{path}/{MANIFEST}"
    try:
        remote.remove(name)
    except UnreachableError:
        if remote.has(name):  # else the store has removed it, and its response was lost
            raise


def _half_removed(model: str, version: int, error: UnreachableError) -> UnreachableError:
    return UnreachableError(
        f"{error}; version {version} of {model} is removed, but some of its files are left: "
        "delete it again"
    )
