"""Remote stores: models under a URL, pulled once into a local cache and mapped from there.

A remote version is there once its manifest.json is, which upload.py writes last. Never imports
torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path

from embedserve_store.errors import StoreError, missing_model, missing_version
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import NAME_PATTERN
from embedserve_store.format.version_folder import VERSION_PATTERN, version_numbers
from embedserve_store.local_store import LocalStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.remote.pull import MANIFEST, RemoteVersion, pull, read_manifest
from embedserve_store.remote.remote_files import RemoteFolder, TransferProgress, UnreachableError
from embedserve_store.writing.version_lock import HeldError, remove_unheld

logger = logging.getLogger(__name__)

READABLE_NAME_MAX = 80
CACHED_VERSIONS = 2
"""The newest of a model that stay in the cache, whether anybody needs them or not: the one that is
served, and one to go back to."""
PULL_ATTEMPTS = 10
"""Another process may drop a version between our pull and our look."""


def is_url(store: str) -> bool:
    """Whether ``store`` is a URL. file:// is one, too: it is pulled where a folder is mapped."""
    return "://" in store


def default_cache() -> Path:
    """Where versions of remote stores are kept unless told."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "embedserve"


class RemoteStore:
    """URL/MODEL/VERSION/ with a LocalStore's methods; loading pulls what the cache has not.

    Processes may share a cache: each version is pulled by one of them, and appears whole, after
    every byte has been checked. Each URL has a folder of its own in the cache. What model_store.py
    finds that nobody needs any more is dropped from there.
    """

    def __init__(
        self, url: str, cache: str | os.PathLike[str], progress: TransferProgress | None = None
    ) -> None:
        self._remote = RemoteFolder(url)
        self._progress = progress
        self._local = LocalStore(Path(cache) / _folder_name(self._remote.url))

    def models(self) -> list[str]:
        """As LocalStore's.

        Raises:
            StoreError: there is nothing under the URL.
            UnreachableError: it cannot be listed.
        """
        names = sorted(name for name in self._remote.folders() if NAME_PATTERN.fullmatch(name))
        return [name for name in names if self.versions(name)]

    def versions(self, model: str) -> list[int]:
        """Published versions of ``model``, ascending; none where there is no such model.

        Raises:
            StoreError: no model can have this name.
            UnreachableError: it cannot be listed.
        """
        return [number for number, files in self._folders(model).items() if MANIFEST in files]

    def next_version(self, model: str) -> int:
        """A number above every version and every upload that was begun."""
        return max(self._folders(model), default=0) + 1

    def load(self, model: str, version: int | None = None) -> ModelVersion:
        """One version of ``model``, the highest unless ``version`` says which.

        While the store cannot be reached, a version that is asked for by its number is loaded from
        the cache if it is there, with a warning; which one is the highest cannot be known then.

        Raises:
            StoreError: it does not exist, is damaged, or is not the one that the cache has.
            UnreachableError: the store cannot be asked.
            OSError: the cache cannot be written.
        """
        try:
            wanted = self._find(model, version)
        except UnreachableError as error:
            if version is None or not self._cached(model, version).is_dir():
                raise
            logger.warning("%s; loading version %d of %r from the cache", error, version, model)
            return self._local.load(model, version)
        folder = self._cached(model, wanted.number)
        loaded = self._pulled(wanted, folder)
        if (folder / MANIFEST).read_bytes() != wanted.manifest_json:
            raise StoreError(
                f"{self._remote.url}/{wanted.path}: is not the version that was pulled to "
                f"{folder}: versions never change; remove that folder to pull this one"
            )
        return loaded

    def _pulled(self, wanted: RemoteVersion, folder: Path) -> ModelVersion:
        """Pulled if need be, and opened; anew where another process removed it in between."""
        for _ in range(PULL_ATTEMPTS):
            if not folder.is_dir():
                pull(self._remote, wanted, folder, self._progress)
            try:
                return self._local.load(wanted.model, wanted.number)
            except StoreError:
                if folder.is_dir():
                    raise
        raise StoreError(f"{folder}: others removed it {PULL_ATTEMPTS} times as it was opened")

    def old(self, model: str, kept: int = CACHED_VERSIONS) -> list[int]:
        """Versions in the cache but for the ``kept`` newest, ascending, which may be dropped if
        nobody needs them."""
        folder = self._local.path / model
        return version_numbers(folder)[:-kept] if folder.is_dir() else []

    def drop(self, model: str, number: int) -> None:
        """Removes a version from the cache, unless somebody has it open; what cannot be removed is
        logged, and stays."""
        folder = self._cached(model, number)
        try:
            remove_unheld(folder)
        except HeldError:
            logger.debug("%s: stays, it is in use", folder)
        except FileNotFoundError:
            logger.debug("%s: another process removed it", folder)
        except (OSError, StoreError) as error:
            logger.warning("%s: stays in the cache: %s", folder, error)
        else:
            logger.info("%s: removed from the cache: newer versions were pulled", folder)

    def manifest(self, model: str, version: int | None = None) -> Manifest:
        """As LocalStore's; pulls nothing."""
        return self._find(model, version).manifest

    def files_beside(self, model: str, what: str) -> list[str]:
        """As LocalStore's."""
        _check_model(model, self._remote.url)
        return list(self._remote.sizes(f"{model}/{what}"))

    def read_beside(self, model: str, what: str, path: str) -> bytes:
        """As LocalStore's."""
        return self._remote.read(f"{model}/{what}/{path}")

    def _cached(self, model: str, number: int) -> Path:
        return self._local.path / model / str(number)

    def _folders(self, model: str) -> dict[int, dict[str, int]]:
        """What lies in each folder of ``model`` that is named as a version, ascending: the bytes
        of each file."""
        _check_model(model, self._remote.url)
        folders: dict[int, dict[str, int]] = {}
        for path, size in self._remote.sizes(model).items():
            number, _, name = path.partition("/")
            if VERSION_PATTERN.fullmatch(number):
                folders.setdefault(int(number), {})[name] = size
        return dict(sorted(folders.items()))

    def _find(self, model: str, version: int | None) -> RemoteVersion:
        """The version that is meant, its manifest read."""
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
        return read_manifest(self._remote, model, number, folders[number])


def _check_model(model: str, where: str) -> None:
    if not NAME_PATTERN.fullmatch(model):
        raise StoreError(f"{where}: {model!r} is not the name of a model")


def _folder_name(url: str) -> str:
    """A name that no other URL has, in which a person recognises this one."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", url).strip("-.")[:READABLE_NAME_MAX]
    return f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
