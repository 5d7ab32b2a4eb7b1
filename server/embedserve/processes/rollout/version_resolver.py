"""Resolves served names in the store, and opens the versions that they point to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from threading import Lock

from embedserve.config import ServeSettings
from embedserve.model_names import split_name
from embedserve.processes.model_loading import (
    check_may_switch,
    load_named,
    make_resident_and_verify,
)
from embedserve.processes.open_store import VersionsToHold, row_selection, versions_to_hold
from embedserve.processes.rollout.messages import AliasSettings, StoreEntry
from embedserve_store import ModelStore, ModelVersion, StoreError
from embedserve_store.errors import UnknownAliasError, UnopenedError

logger = logging.getLogger(__name__)


class VersionResolver:
    """Resolves served names, and keeps the versions that it has opened for them until ``forget``.

    A single process serves the opened version itself (``take_opened``). Workers open its folder
    again. What is kept then only holds the version's lock, so that it is not dropped from the cache
    of a remote store before they do. Methods are called in threads, because a remote store is slow.
    Several names may be opened at once.
    """

    def __init__(
        self,
        settings: ServeSettings,
        why_not_yet: Callable[[ModelVersion], str] = lambda version: "",
    ) -> None:
        """
        Args:
            why_not_yet: returns why an opened version cannot be served yet, "" if it can.
        """
        self._settings = settings
        self._why_not_yet = why_not_yet
        self._store: ModelStore | None = None
        self._faults: dict[str, str] = {}
        self._opened: dict[str, ModelVersion] = {}
        self._one_at_a_time = Lock()  # for versions that are checked against the free memory

    def resolve(self, names: Iterable[str], *, is_all: bool = False) -> dict[str, StoreEntry]:
        """Returns the state in the store of each followed name, or of all ``names`` if ``is_all``.
        Names that the store cannot resolve are left out; the reason is logged when it changes, and
        when it is gone."""
        entries = {}
        for name in names:
            if is_all or _is_followed(split_name(name)[1], self._settings.follow):
                entry = self._find_entry(name)
                if entry is not None:
                    entries[name] = entry
        return entries

    def _find_entry(self, name: str) -> StoreEntry | None:
        try:
            entry = self._read_entry(name)
        except UnknownAliasError:
            # The error lists the versions there are, so each publication would log it again.
            self._log_fault(name, "its alias does not exist: its version stays, without a share")
            return StoreEntry(0)
        except (StoreError, OSError) as error:
            self._log_fault(name, str(error))
            return None
        self._log_fault(name, "")
        return entry

    def _read_entry(self, name: str) -> StoreEntry:
        model, tag = split_name(name)
        store = self._opened_store()
        if not tag or tag.isdigit():
            number = store.resolve(model, tag or None)
            return StoreEntry(number, AliasSettings(number))
        alias = store.alias(model, tag)
        assert alias.version is not None  # the store rejects an alias without a version
        alias_settings = AliasSettings(alias.version, alias.share, alias.shadow, alias.at_seq)
        return StoreEntry(alias.version, alias_settings)

    def _log_fault(self, name: str, fault: str) -> None:
        before = self._faults.get(name, "")
        self._faults[name] = fault
        if fault and fault != before:
            logger.error("%s cannot be followed: %s", name, fault)
        elif before and not fault:
            logger.info("%s can be followed again", name)

    def versions_to_hold(self, model: str, unfit: Collection[int]) -> VersionsToHold | None:
        """Returns the versions of ``model`` that a shard is to hold, without those of ``unfit``.
        None if the store cannot be read; the reason is logged as by ``resolve``."""
        held_max, name = self._settings.versions_held, f"versions of {model}"
        try:
            found = versions_to_hold(self._opened_store(), model, held_max, unfit)
        except (StoreError, OSError) as error:
            self._log_fault(name, str(error))
            return None
        self._log_fault(name, "")
        return found

    def open_current(self, name: str) -> ModelVersion:
        """Opens and keeps the version that ``name`` points to now. From a remote store it is first
        pulled; it is made resident and verified according to the settings.

        Raises:
            StoreError: there is no such version, it differs from its published state, it does not
                fit into memory, or the settings allow no other version while the server runs.
        """
        check_may_switch(self._settings, self._settings.devices)
        try:
            return self._keep(name, load_named(self._opened_store(), name))
        except (OSError, MemoryError) as error:
            raise StoreError(f"{name}: {error}") from error

    def open_number(self, name: str, number: int) -> ModelVersion:
        """Opens and keeps version ``number`` for ``name``, as ``open_current`` does, unless it is
        kept already.

        Raises:
            UnopenedError: the version cannot be opened now.
            StoreError: the version differs from its published state, it does not fit into memory,
                or the settings allow no other version while the server runs.
        """
        check_may_switch(self._settings, self._settings.devices)
        opened = self._opened.pop(name, None)
        if opened is not None and opened.manifest.version == number:
            self._opened[name] = opened
            return opened
        del opened
        try:
            version = self._opened_store().load(split_name(name)[0], number)
        except (StoreError, OSError) as error:
            raise UnopenedError(str(error)) from error
        if why := self._why_not_yet(version):
            raise UnopenedError(why)
        try:
            return self._keep(name, version)
        except (OSError, MemoryError) as error:
            raise StoreError(f"{version.path}: {error}") from error

    def take_opened(self, name: str, number: int) -> ModelVersion:
        """Returns the version as ``open_number`` does, and does not keep it."""
        version = self.open_number(name, number)
        self.forget(name)
        return version

    def forget(self, name: str) -> None:
        """Releases the version that was opened for ``name``."""
        self._opened.pop(name, None)

    def _keep(self, name: str, version: ModelVersion) -> ModelVersion:
        with self._one_at_a_time:
            served = make_resident_and_verify(self._settings, {name: version}, is_shown=False)[name]
        self._opened[name] = served
        return served

    def _opened_store(self) -> ModelStore:
        if self._store is None:
            settings = self._settings
            selection = row_selection(settings)
            self._store = ModelStore(settings.store, settings.cache, selection=selection)
        return self._store


def _is_followed(tag: str, follow: str) -> bool:
    if not tag:
        return follow == "latest"
    return follow != "none" and not tag.isdigit()
