"""The store that a user names, in a folder or behind a URL. Never imports torch or writes."""

from __future__ import annotations

import os
from pathlib import Path

from embedserve_store.format.manifest import Manifest
from embedserve_store.local_store import LocalStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.remote.remote_files import TransferProgress
from embedserve_store.remote.remote_store import RemoteStore, default_cache, is_url


class ModelStore:
    """Published models: STORE/MODEL/VERSION/, where STORE is a folder or a URL such as
    s3://bucket/folder.

    Attributes:
        where: as it was given.
        is_remote: whether loading a version pulls it into the cache first.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        cache: Path | None = None,
        progress: TransferProgress | None = None,
    ) -> None:
        """
        Args:
            cache: a folder for the versions of remote stores. Default: ``default_cache``.
            progress: told of pulls.

        Raises:
            StoreError: what this kind of URL needs is not installed.
        """
        self.where = os.fspath(where)
        self.is_remote = is_url(self.where)
        self._store: LocalStore | RemoteStore
        if self.is_remote:
            self._store = RemoteStore(self.where, cache or default_cache(), progress)
        else:
            self._store = LocalStore(self.where)

    def models(self) -> list[str]:
        """Names of the models that have a version, sorted.

        Raises:
            StoreError: the store cannot be read; so for every method here.
        """
        return self._store.models()

    def versions(self, model: str) -> list[int]:
        """Published versions of ``model``, ascending."""
        return self._store.versions(model)

    def manifest(self, model: str, version: int | None = None) -> Manifest:
        """What a version is, the highest unless ``version`` says which; nothing of it is mapped or
        pulled.

        Raises:
            StoreError: it does not exist, or its manifest is damaged.
        """
        return self._store.manifest(model, version)

    def load(self, model: str, version: int | None = None) -> ModelVersion:
        """One version of ``model``, the highest unless ``version`` says which.

        Raises:
            StoreError: it does not exist, or one of its files is missing, damaged, of another
                format version, or contradicts another. Rows are not read: see verification.py.
            OSError: the cache cannot be written.
        """
        return self._store.load(model, version)
