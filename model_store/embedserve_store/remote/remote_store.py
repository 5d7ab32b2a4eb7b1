"""Reads remote stores: versions under a URL are pulled once into a local cache and mapped there.

A remote version exists once its manifest.json does, which upload.py writes last. Never imports
torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from embedserve_store.errors import StoreError, UnreachableError, missing_model, missing_version
from embedserve_store.format.delta_manifest import DELTAS_FOLDER
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import NAME_PATTERN, check_model_name
from embedserve_store.format.version_folder import VERSION_PATTERN, version_numbers
from embedserve_store.local_store import LocalStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.parts.part import RowSelection
from embedserve_store.remote.pull import pull
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.transfer.file_check import MANIFEST
from embedserve_store.transfer.part_transfer import select_rows
from embedserve_store.transfer.receive import TransferProgress
from embedserve_store.transfer.stored_version import (
    SMALL_FILE_BYTES_MAX,
    StoredVersion,
    stored_version,
)
from embedserve_store.writing.version_lock import VersionInUseError, remove_unused

logger = logging.getLogger(__name__)

READABLE_NAME_MAX = 80
CACHED_VERSIONS = 2
"""Number of a model's newest versions that always stay in the cache: the version in use, and a
version to roll back to."""
PULL_ATTEMPTS = 10
"""Attempts to pull and open a version, which another process may drop from the cache in between."""


def is_url(store: str) -> bool:
    """Returns whether ``store`` is a URL.

    file:// counts as a URL: its versions are pulled, while versions in a folder are mapped in
    place.
    """
    return "://" in store


def default_cache() -> Path:
    """Returns the default folder in which versions of remote stores are cached."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser() / "embedserve"
    except RuntimeError:  # neither HOME nor a name for the user id: the home that Docker sets
        return Path("/.cache/embedserve")


class RemoteStore:
    """A store at URL/MODEL/VERSION/. ModelStore describes the methods.

    Loading a version pulls it if it is not in the cache. Processes may share a cache. Each version
    is pulled by one process, and appears whole after every byte has been checked. Each URL has its
    own folder in the cache, and so has each part. model_store.py drops unused versions from the
    cache.

    Args:
        selection: rows of the versions that ``load`` pulls and opens.
    """

    def __init__(
        self,
        url: str,
        cache: str | os.PathLike[str],
        progress: TransferProgress | None = None,
        selection: RowSelection = None,
    ) -> None:
        self._remote = RemoteFolder(url)
        self._progress = progress
        self._selection = selection
        name = _folder_name(self._remote.url)
        if selection is not None:
            name += selection.cache_suffix
        self._local = LocalStore(Path(cache) / name, selection)

    def models(self) -> list[str]:
        """Returns the names of the models; raises StoreError if nothing is under the URL."""
        names = sorted(name for name in self._remote.folders() if NAME_PATTERN.fullmatch(name))
        return [name for name in names if self.versions(name)]

    def versions(self, model: str) -> list[int]:
        """Returns the versions of ``model``; empty if there is no such model."""
        return [number for number, files in self._folders(model).items() if MANIFEST in files]

    def next_version(self, model: str) -> int:
        """Returns a number above every version and every upload that was started."""
        return max(self._folders(model), default=0) + 1

    def load(self, model: str, version: int | None = None) -> ModelVersion:
        """Pulls a version of ``model``, by default the highest, if needed, and opens it.

        If the store cannot be reached, a version requested by number is loaded from the cache, with
        a warning. The highest version cannot be determined then.
        """
        try:
            wanted = self.stored(model, version)
        except UnreachableError as error:
            if version is None or not self._cached(model, version).is_dir():
                raise
            logger.warning("%s; loading version %d of %r from the cache", error, version, model)
            return self._local.load(model, version)
        folder = self._cached(model, wanted.number)
        loaded = self._pull_and_open(wanted, folder)
        if (folder / MANIFEST).read_bytes() != wanted.manifest_json:
            raise StoreError(
                f"{wanted.where}: is not the version that was pulled to "
                f"{folder}: versions never change; remove that folder to pull this one"
            )
        return loaded

    def _pull_and_open(self, wanted: StoredVersion, folder: Path) -> ModelVersion:
        """Pulls the version if needed and opens it. Retries if another process removes it."""
        for _ in range(PULL_ATTEMPTS):
            if not os.path.isdir(folder):  # False also where nothing may be looked up
                if self._selection is not None and wanted.selection is None:
                    wanted = select_rows(wanted, self._selection)
                listed = self._remote.listing_checksum(wanted.path)
                pull(wanted, folder, listed, self._progress)
            try:
                return self._local.load(wanted.model, wanted.number)
            except StoreError:
                if folder.is_dir():
                    raise
        raise StoreError(f"{folder}: others removed it {PULL_ATTEMPTS} times as it was opened")

    def old(self, model: str, kept: int = CACHED_VERSIONS) -> list[int]:
        """Returns the cached versions except the ``kept`` newest, ascending.

        The caller may drop these versions if they are not in use.
        """
        folder = self._local.path / model
        return version_numbers(folder)[:-kept] if folder.is_dir() else []

    def drop(self, model: str, number: int) -> None:
        """Removes a version from the cache, unless a process has it open.

        A version that cannot be removed stays in the cache, and the error is logged.
        """
        folder = self._cached(model, number)
        try:
            remove_unused(folder)
        except VersionInUseError:
            logger.debug("%s: stays, it is in use", folder)
        except FileNotFoundError:
            logger.debug("%s: another process removed it", folder)
        except (OSError, StoreError) as error:
            logger.warning("%s: stays in the cache: %s", folder, error)
        else:
            logger.info("%s: removed from the cache: newer versions were pulled", folder)

    def manifest(self, model: str, version: int | None = None) -> Manifest:
        """Reads the manifest of a version, by default the highest, and pulls nothing."""
        return self.stored(model, version).manifest

    def stored(self, model: str, version: int | None = None) -> StoredVersion:
        """Returns a version, by default the highest, as files to transfer. Reads its manifest."""
        folders = self._folders(model)
        published = [number for number, files in folders.items() if MANIFEST in files]
        where = f"{self._remote.url}/{model}"
        if not folders:
            raise missing_model(self._remote.url, model, self.models())
        if not published:
            raise StoreError(f"{where}: no version is published")
        number = published[-1] if version is None else version
        if number not in published:
            raise missing_version(where, number, published)
        listed, remote = folders[number], self._remote
        return stored_version(
            f"{where}/{number}",
            model,
            number,
            listed,
            lambda: remote.read(f"{model}/{number}/{MANIFEST}", SMALL_FILE_BYTES_MAX),
            lambda name, start, stop: remote.blocks(f"{model}/{number}/{name}", start, stop),
            selection=self._selection,
        )

    def files_beside(self, model: str, what: str) -> list[str]:
        """Returns the paths of the files in the folder ``what`` beside the versions."""
        check_model_name(model, self._remote.url)
        return list(self._remote.sizes(f"{model}/{what}"))

    def names_beside(self, model: str, path: str) -> Iterator[str]:
        """Yields the names of the files in a folder beside the versions, page by page."""
        check_model_name(model, self._remote.url)
        return self._remote.names(f"{model}/{path}")

    def modified_s(self, path: str) -> float | None:
        """Returns when the file at ``path`` was written; None if the store does not say so."""
        return self._remote.modified_s(path)

    def folders(self, path: str) -> list[str]:
        """Returns the names of the folders at ``path`` in the store; empty if there are none."""
        try:
            return self._remote.folders(path)
        except UnreachableError:
            raise
        except StoreError:
            return []

    def files(self, path: str) -> list[str]:
        """Returns the names of the files in the folder at ``path``."""
        return list(self._remote.sizes(path))

    def read(self, path: str, bytes_max: int) -> bytes:
        """Reads the file at ``path``, of up to ``bytes_max`` bytes."""
        return self._remote.read(path, bytes_max)

    def _cached(self, model: str, number: int) -> Path:
        return self._local.path / model / str(number)

    def _folders(self, model: str) -> dict[int, dict[str, int]]:
        """Returns the files of each version folder of ``model``, by version, ascending.

        Each value maps file names to sizes in bytes. Folders of unfinished uploads are included.
        """
        check_model_name(model, self._remote.url)
        folders: dict[int, dict[str, int]] = {}
        for path, size in self._version_files(model).items():
            number, _, name = path.partition("/")
            if VERSION_PATTERN.fullmatch(number):
                folders.setdefault(int(number), {})[name] = size
        return dict(sorted(folders.items()))

    def _version_files(self, model: str) -> dict[str, int]:
        """Returns the bytes of the files in the version folders of ``model``, by their paths.

        Files beside the versions may be listed, too. Deltas are not: there may be many thousands,
        and one request lists a thousand files.
        """
        folders = self.folders(model)
        if DELTAS_FOLDER not in folders:
            return self._remote.sizes(model)
        numbers = [name for name in folders if VERSION_PATTERN.fullmatch(name)]
        return {
            f"{number}/{name}": size
            for number in numbers
            for name, size in self._remote.sizes(f"{model}/{number}").items()
        }


def _folder_name(url: str) -> str:
    """Returns a folder name that is unique to ``url`` and readable."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", url).strip("-.")[:READABLE_NAME_MAX]
    return f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
