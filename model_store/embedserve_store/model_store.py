"""Model store in a folder or behind a URL. Never imports torch; writes only to the cache."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from embedserve_store.errors import NoRoomError, StoreError, UnknownAliasError
from embedserve_store.format import event, note
from embedserve_store.format.alias import (
    ALIASES_FOLDER,
    Alias,
    alias_path,
    parse_alias,
    parse_alias_path,
)
from embedserve_store.format.delta_manifest import (
    DELTAS_FOLDER,
    MANIFEST_BYTES_MAX,
    DeltaManifest,
    manifest_name,
    parse_delta,
)
from embedserve_store.format.event import Event
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import check_model_name
from embedserve_store.format.version_folder import VERSION_PATTERN
from embedserve_store.local_store import LocalStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.parts.part import RowSelection
from embedserve_store.remote.remote_store import RemoteStore, default_cache, is_url
from embedserve_store.transfer.receive import TransferProgress
from embedserve_store.transfer.stored_version import SMALL_FILE_BYTES_MAX, StoredVersion

logger = logging.getLogger(__name__)


class ModelStore:
    """Published models at STORE/MODEL/VERSION/.

    STORE is a folder or a URL such as s3://bucket/folder.

    Attributes:
        where: folder or URL of the store, as the caller passed it.
        is_remote: whether loading a version pulls it into the cache first.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        cache: str | os.PathLike[str] | None = None,
        progress: TransferProgress | None = None,
        selection: RowSelection = None,
    ) -> None:
        """
        Args:
            cache: folder for the versions of remote stores. Default, and if it is "":
                ``default_cache``.
            progress: callback that reports the progress of pulls.
            selection: rows of the versions that ``load`` opens: a Part, LocalTables, or NO_ROWS.
                From a remote store only these rows are pulled. Default: all rows.

        Raises:
            StoreError: a package that this kind of URL needs is not installed.
        """
        self.where = os.fspath(where)
        self.is_remote = is_url(self.where)
        self._store: LocalStore | RemoteStore
        if self.is_remote:
            self._store = RemoteStore(
                self.where, Path(cache) if cache else default_cache(), progress, selection
            )
        else:
            self._store = LocalStore(self.where, selection)

    def models(self) -> list[str]:
        """Returns the sorted names of the models that have a version.

        Raises:
            StoreError: the store does not exist.
            UnreachableError: the store cannot be reached. Every method of this class raises it
                then.
        """
        return self._store.models()

    def versions(self, model: str) -> list[int]:
        """Returns the published versions of ``model``, ascending.

        Raises:
            StoreError: the name is not that of a model. Or there is no such model in a folder;
                behind a URL it has no versions.
        """
        return self._store.versions(model)

    def manifest(self, model: str, version: int | str | None = None) -> Manifest:
        """Reads the manifest of a version, by default the highest.

        The version is neither mapped nor pulled.

        Raises:
            StoreError: the version does not exist, or its manifest is damaged.
        """
        return self._store.manifest(model, self._number(model, version))

    def stored(self, model: str, version: int | str | None = None) -> StoredVersion:
        """Returns a version, by default the highest, as files to transfer.

        Raises:
            StoreError: the version does not exist, or its manifest is damaged.
        """
        return self._store.stored(model, self._number(model, version))

    def files_beside(self, model: str, what: str) -> list[str]:
        """Returns the paths NAME/FILE in the folder ``what`` beside the versions of ``model``, such
        as that of its aliases; none if there is no such folder."""
        return self._store.files_beside(model, what)

    def folders_beside(self, model: str, what: str) -> list[str]:
        """Returns the names of the folders in the folder ``what`` beside the versions."""
        return self._store.folders(f"{model}/{what}")

    def names_beside(self, model: str, path: str) -> Iterator[str]:
        """Yields the names of the files in a folder such as deltas/7 beside the versions, in any
        order; none if there is no folder. A folder may have millions: they are not all held in
        memory, if the store lists folders or pages."""
        return self._store.names_beside(model, path)

    def read(self, path: str, bytes_max: int = SMALL_FILE_BYTES_MAX) -> bytes:
        """Reads the file at ``path`` in the store, of up to ``bytes_max`` bytes; lists nothing.

        Raises:
            MissingFileError: the file does not exist.
            StoreError: the file is larger; no more than one byte beyond the limit is read.
        """
        return self._store.read(path, bytes_max)

    def delta(self, model: str, line: int, seq: int) -> tuple[DeltaManifest, bytes]:
        """Reads the manifest of a delta, and returns it with the bytes of its file.

        Raises:
            MissingFileError: the delta does not exist.
            StoreError: the manifest is damaged, or belongs elsewhere.
        """
        path = f"{model}/{DELTAS_FOLDER}/{line}/{manifest_name(seq)}"
        text = self.read(path, MANIFEST_BYTES_MAX)
        return parse_delta(text, model, line, seq, f"{self.where}/{path}"), text

    def modified_s(self, path: str) -> float | None:
        """Returns when the file at ``path`` in the store was written, in seconds since the Unix
        epoch; None if the store does not say so. Raises MissingFileError."""
        return self._store.modified_s(path)

    def aliases(self, model: str) -> dict[str, Alias]:
        """Returns the current aliases of ``model`` by name, sorted."""
        changes = self.alias_changes(model)
        now = {name: self._alias(model, name, max(numbers)) for name, numbers in changes.items()}
        return {name: one for name, one in sorted(now.items()) if one.version is not None}

    def alias_history(self, model: str, name: str) -> list[Alias]:
        """Returns the changes of an alias, the latest first; none if the alias does not exist."""
        numbers = self.alias_changes(model).get(name, [])
        return [self._alias(model, name, number) for number in sorted(numbers, reverse=True)]

    def alias(self, model: str, name: str) -> Alias:
        """Returns the current state of an alias; raises UnknownAliasError if it does not exist."""
        changes = self.alias_changes(model)
        alias = self._alias(model, name, max(changes[name])) if name in changes else None
        if alias is None or alias.version is None:
            there = ", ".join(self.aliases(model)) or "none"
            versions = ", ".join(map(str, self.versions(model))) or "none"
            raise UnknownAliasError(
                f"{self.where}/{model}: {name!r} is no version and no alias, aliases are {there}; "
                f"versions are {versions}"
            )
        return alias

    def note_numbers(self, model: str, version: int) -> list[int]:
        """Returns the numbers of a version's notes, ascending, without reading the notes."""
        found = map(note.parse_note_path, self._store.files_beside(model, note.NOTES_FOLDER))
        return sorted(one[1] for one in found if one is not None and one[0] == version)

    def notes(self, model: str, version: int) -> list[note.Note]:
        """Returns the notes of a version, the oldest first."""
        return [self._note(model, version, one) for one in self.note_numbers(model, version)]

    def _note(self, model: str, version: int, number: int) -> note.Note:
        path = f"{model}/{note.note_path(version, number)}"
        return note.parse_note(self.read(path), model, version, number, f"{self.where}/{path}")

    def history(self, model: str = "", last: int = 50) -> list[Event]:
        """Returns the ``last`` changes of ``model``, or of the store; the latest first.

        Lists the days that have them, and reads no other event.
        """
        if model:
            check_model_name(model, self.where)
        store, root = self._store, event.HISTORY_FOLDER
        paths: list[str] = []
        for name in [model] if model else store.folders(root):
            found: list[str] = []
            days = filter(event.DAY_PATTERN.fullmatch, store.folders(f"{root}/{name}"))
            for day in sorted(days, reverse=True):
                folder = f"{root}/{name}/{day}"
                files = filter(event.FILE_PATTERN.fullmatch, store.files(folder))
                found += [f"{folder}/{file}" for file in files]
                if len(found) >= last:
                    break
            paths += found
        newest = sorted(paths, key=lambda path: path.rpartition("/")[2], reverse=True)[:last]
        return [event.parse_event(self.read(path), f"{self.where}/{path}") for path in newest]

    def load(self, model: str, version: int | str | None = None) -> ModelVersion:
        """Opens a version of ``model`` by its number or an alias, by default the highest.

        The version is locked against removal until nothing refers to it.

        Raises:
            StoreError: the version does not exist. Or one of its files is missing, damaged, of
                another format version, or contradicts another file. Or the cache cannot be written,
                or differs from the copy there, or the version does not have the part that the store
                was opened with. Rows are not read: see verification.py.
        """
        alias = self.alias_named(model, version)
        if alias is not None:
            return replace(self.load(model, alias.version), at_seq=alias.at_seq)
        store, number = self._store, self._number(model, version)
        if not isinstance(store, RemoteStore):
            return store.load(model, number)
        loaded = None
        with contextlib.suppress(NoRoomError):
            loaded = store.load(model, number)
        if loaded is None:  # retries after older versions have been dropped to free space
            self._tidy(store, model, store.old(model, kept=1))
            loaded = store.load(model, number)
        self._tidy(store, model, store.old(model))
        return loaded

    def _tidy(self, store: RemoteStore, model: str, old: list[int]) -> None:
        """Drops from the cache the versions of ``old`` that are neither open nor named by an alias.

        If the aliases cannot be read, nothing is dropped.
        """
        if not old:
            return
        try:
            named = {one.version for one in self.aliases(model).values()}
        except StoreError as error:
            logger.warning("%s; nothing is dropped from the cache", error)
            return
        for number in old:
            if number not in named:
                store.drop(model, number)

    def resolve(self, model: str, version: int | str | None = None) -> int:
        """Returns the number of a version, of an alias's version, or of the highest version.

        The version is not opened.
        """
        number = self._number(model, version)
        if number is not None:
            return number
        published = self.versions(model)
        if not published:
            raise StoreError(f"{self.where}/{model}: no version is published")
        return published[-1]

    def _number(self, model: str, version: int | str | None) -> int | None:
        """Returns ``version`` as a number, resolving an alias to its version."""
        alias = self.alias_named(model, version)
        if alias is not None:
            return alias.version
        return None if version is None else int(version)

    def alias_named(self, model: str, version: int | str | None) -> Alias | None:
        """Returns the alias that ``version`` names; None if it is a number or None."""
        if not isinstance(version, str) or VERSION_PATTERN.fullmatch(version):
            return None
        return self.alias(model, version)

    def alias_changes(self, model: str) -> dict[str, list[int]]:
        """Returns the numbers of all changes by alias name, without reading a file."""
        changes: dict[str, list[int]] = {}
        for found in map(parse_alias_path, self._store.files_beside(model, ALIASES_FOLDER)):
            if found is not None:
                changes.setdefault(found[0], []).append(found[1])
        return changes

    def _alias(self, model: str, name: str, number: int) -> Alias:
        path = f"{model}/{alias_path(name, number)}"
        return parse_alias(self.read(path), model, name, number, f"{self.where}/{path}")
