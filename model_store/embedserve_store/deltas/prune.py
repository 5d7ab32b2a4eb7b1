"""Removes deltas that no stored version needs any more. Imports no torch."""

from __future__ import annotations

import heapq
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedserve_store.deltas.delta_line import stored_seqs
from embedserve_store.errors import MissingFileError, UnreachableError
from embedserve_store.format.delta_manifest import (
    DELTAS_FOLDER,
    parse_file_seq,
    parse_manifest_name,
    position_of,
)
from embedserve_store.format.version_folder import VERSION_PATTERN
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.added_file import STALE_S
from embedserve_store.publishing.record_event import record_event
from embedserve_store.remote.remote_files import RemoteFolder

KEEP_S = 24 * 3600.0
"""Seconds for which a delta is kept in any case: servers that are behind may still need it."""
NAMES_MAX = 100_000
"""Names of files that are held in memory, some 20 MB. The line is listed once for every NAMES_MAX
files that are removed."""

_Entry = tuple[int, bool, str]
"""Seq, whether the file has rows, and its name: a manifest comes before the rows of its delta."""


@dataclass(frozen=True)
class PrunedDeltas:
    """Deltas that were removed from one line, or would be.

    Attributes:
        first, last: first and last seq.
        count: number of deltas.
    """

    line: int
    first: int
    last: int
    count: int


def prune_deltas(
    store: str | os.PathLike[str],
    model: str,
    *,
    keep_s: float = KEEP_S,
    is_trial: bool = False,
) -> list[PrunedDeltas]:
    """Removes the deltas that every stored version of their line has in its rows.

    A line without a stored version loses all its deltas. The oldest delta is removed first, and its
    manifest before its files, so that a run that was interrupted leaves whole deltas in sequence.
    Files without a manifest, which killed writers left, are removed, too, once they are as old.

    Args:
        store: a folder or a URL.
        keep_s: deltas are kept whose rows were read in these last seconds.
        is_trial: removes nothing, and only returns what would be removed.

    Returns:
        The removed deltas of each line that had some, by line.

    Raises:
        StoreError: the manifest of a delta is damaged. What was removed before stays removed.
        UnreachableError: the store cannot be read or written.
        ValueError: keep_s is negative.
    """
    if keep_s < 0:
        raise ValueError(f"keep_s is {keep_s:g}, expected 0 or more")
    models = ModelStore(store)
    folders = filter(VERSION_PATTERN.fullmatch, models.folders_beside(model, DELTAS_FOLDER))
    lines = [_Line(models, model, line, keep_s) for line in sorted(map(int, folders))]
    needed_after = _needed_after(models, model)
    pruned = []
    for line in lines:
        old = line.old(needed_after.get(line.number))
        try:
            if not is_trial:
                line.remove(old, needed_after.get(line.number, 0))
        finally:
            if not is_trial:
                old = old[old <= line.removed_to]
            if len(old):
                one = PrunedDeltas(line.number, int(old[0]), int(old[-1]), len(old))
                pruned.append(one)
                if not is_trial:
                    detail = f"deltas {one.first} to {one.last} of line {one.line}"
                    record_event(models.where, "prune", model, (), detail=detail)
    return pruned


def _needed_after(models: ModelStore, model: str) -> dict[int, int]:
    """Returns the seq after which some version needs deltas, by line."""
    found: dict[int, int] = {}
    for version in models.versions(model):
        start = position_of(models.manifest(model, version))
        found[start.line] = min(start.seq, found.get(start.line, start.seq))
    return found


class _Line:
    """Removes the old files of a line.

    Attributes:
        removed_to: seq of the last delta that was removed; 0 if none was.
    """

    def __init__(self, models: ModelStore, model: str, number: int, keep_s: float) -> None:
        self.number = number
        self.removed_to = 0
        self._models, self._model = models, model
        self._folder = f"{DELTAS_FOLDER}/{number}"
        self._keep_s = keep_s
        self._now_s = time.time()
        self._seqs = stored_seqs(models, model, number)

    def old(self, needed_after: int | None) -> NDArray[np.int64]:
        """Returns the seqs of the deltas to remove, ascending.

        Few manifests are read: those of a binary search.

        Args:
            needed_after: seq after which a version needs deltas; None if there is no version.
        """
        seqs = self._seqs
        if needed_after is not None:
            seqs = seqs[seqs <= needed_after]
        before_s = self._now_s - self._keep_s
        return seqs[: bisect_left(seqs, True, key=lambda seq: self._as_of_s(int(seq)) >= before_s)]

    def remove(self, old: NDArray[np.int64], needed_after: int) -> None:
        """Removes deltas, and files without a manifest that are old enough.

        Args:
            old: seqs of the deltas.
            needed_after: no writer appends a delta up to this seq.
        """
        last = int(old[-1]) if len(old) else 0
        remove = _remover(self._models)
        for seq, has_rows, name in _in_order(self._names, lambda one: self._may_go(one, last)):
            path = f"{self._model}/{self._folder}/{name}"
            if seq <= last or self._is_left_over(path, is_past=seq <= needed_after):
                remove(path)
                if not has_rows:
                    self.removed_to = seq
        if not self._models.is_remote:
            with suppress(OSError):  # later deltas are there
                (Path(self._models.where) / self._model / self._folder).rmdir()

    def _names(self) -> Iterator[str]:
        return self._models.names_beside(self._model, self._folder)

    def _may_go(self, entry: _Entry, last: int) -> bool:
        """Returns whether a file is that of an old delta, or has rows without a manifest."""
        seq, has_rows, _ = entry
        if seq <= last or not has_rows:
            return seq <= last
        at = int(np.searchsorted(self._seqs, seq))
        return at == len(self._seqs) or int(self._seqs[at]) != seq

    def _is_left_over(self, path: str, *, is_past: bool) -> bool:
        """Returns whether a file without a manifest is old enough to be nobody's.

        Args:
            is_past: whether no writer can append a delta with this file.
        """
        keep_s = self._keep_s if is_past else max(self._keep_s, STALE_S)
        try:
            modified_s = self._models.modified_s(path)
        except MissingFileError:
            return False
        return modified_s is not None and modified_s <= self._now_s - keep_s

    def _as_of_s(self, seq: int) -> float:
        """Returns when the rows of a delta were read; 0 if another run has just removed it."""
        try:
            delta, _ = self._models.delta(self._model, self.number, seq)
        except MissingFileError:
            return 0.0
        return datetime.fromisoformat(delta.as_of).timestamp()


def _in_order(
    names: Callable[[], Iterable[str]], is_wanted: Callable[[_Entry], bool]
) -> Iterator[_Entry]:
    """Yields the wanted files of a line in the order of their deltas.

    At most NAMES_MAX are in memory.

    Args:
        names: lists the names; called once for each NAMES_MAX that are wanted.
    """
    after: _Entry = (0, False, "")
    while True:
        entries = (entry for name in names() if (entry := _entry(name)) is not None)
        batch = heapq.nsmallest(NAMES_MAX, (e for e in entries if e > after and is_wanted(e)))
        yield from batch
        if len(batch) < NAMES_MAX:
            return
        after = batch[-1]


def _entry(name: str) -> _Entry | None:
    if (seq := parse_manifest_name(name)) is not None:
        return seq, False, name
    seq = parse_file_seq(name)
    return None if seq is None else (seq, True, name)


def _remover(models: ModelStore) -> Callable[[str], None]:
    """Returns a function that removes a file of the store, if it is there."""
    remote = RemoteFolder(models.where) if models.is_remote else None

    def remove(name: str) -> None:
        path = Path(models.where) / name
        try:
            if remote is None:
                path.unlink(missing_ok=True)
            else:
                remote.remove(name)
        except MissingFileError:
            return
        except OSError as error:
            raise UnreachableError(f"{path}: cannot be removed: {error.strerror}") from error

    return remove
