"""Removes deltas that no stored version needs any more. Imports no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from embedserve_store.errors import StoreError
from embedserve_store.format.delta_manifest import (
    FOLDER,
    manifest_name,
    parse_delta,
    parse_file_seq,
    parse_manifest_name,
    position_of,
)
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.record_event import record_event
from embedserve_store.remote.remote_files import RemoteFolder

KEEP_S = 24 * 3600.0
"""Seconds for which a delta is kept in any case: servers that are behind may still need it."""


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

    These are all deltas of a line without a version. Files of killed writers go along.

    Args:
        store: a folder or a URL.
        keep_s: deltas are kept whose rows were read in these last seconds.
        is_trial: removes nothing, and only returns what would be removed.

    Returns:
        The removed deltas of each line that had some, by line.

    Raises:
        StoreError: the store cannot be read or written, or the manifest of a delta is damaged.
            What was removed before stays removed.
        ValueError: keep_s is negative.
    """
    if keep_s < 0:
        raise ValueError(f"keep_s is {keep_s:g}, expected 0 or more")
    models = ModelStore(store)
    lines: dict[int, list[str]] = {}
    for path in models.files_beside(model, FOLDER):
        folder, _, name = path.partition("/")
        if folder.isdecimal():
            lines.setdefault(int(folder), []).append(name)
    needed_after = _needed_after(models, model)
    pruned = []
    for line, names in sorted(lines.items()):
        seqs = sorted(seq for name in names if (seq := parse_manifest_name(name)))
        some = [seq for seq in seqs if line not in needed_after or seq <= needed_after[line]]
        old = some[: _count_before(models, model, line, some, time.time() - keep_s)]
        if not is_trial:
            # No writer appends up to needed_after: files there without a manifest are left over.
            left_over = {*range(1, needed_after.get(line, 0) + 1)} - {*seqs}
            _remove(models, f"{model}/{FOLDER}/{line}", names, left_over | {*old})
        if old:
            pruned.append(PrunedDeltas(line, old[0], old[-1], len(old)))
            if not is_trial:
                detail = f"deltas {old[0]} to {old[-1]} of line {line}"
                record_event(models.where, "prune", model, (), detail=detail)
    return pruned


def _needed_after(models: ModelStore, model: str) -> dict[int, int]:
    """Returns the seq after which some version needs deltas, by line."""
    found: dict[int, int] = {}
    for version in models.versions(model):
        start = position_of(models.manifest(model, version))
        found[start.line] = min(start.seq, found.get(start.line, start.seq))
    return found


def _count_before(
    models: ModelStore, model: str, line: int, seqs: Sequence[int], before_s: float
) -> int:
    """Returns the number of the ascending ``seqs`` whose rows were read before a time.

    Few manifests are read: those of a binary search.
    """
    low, high = 0, len(seqs)
    while low < high:
        middle = (low + high) // 2
        seq = seqs[middle]
        path = f"{line}/{manifest_name(seq)}"
        where = f"{models.where}/{model}/{FOLDER}/{path}"
        delta = parse_delta(models.read_beside(model, FOLDER, path), model, line, seq, where)
        if datetime.fromisoformat(delta.as_of).timestamp() < before_s:
            low = middle + 1
        else:
            high = middle
    return low


def _remove(models: ModelStore, folder: str, names: Sequence[str], seqs: Collection[int]) -> None:
    """Removes all files of deltas; manifests first, so that none is left without its rows."""
    manifests = [name for name in names if parse_manifest_name(name) in seqs]
    files = [name for name in names if parse_file_seq(name) in seqs]
    remove = _remover(models)
    for name in (*sorted(manifests), *sorted(files)):
        remove(f"{folder}/{name}")
    if not models.is_remote:
        with suppress(OSError):  # later deltas are there
            (Path(models.where) / folder).rmdir()


def _remover(models: ModelStore) -> Callable[[str], None]:
    if models.is_remote:
        return RemoteFolder(models.where).remove

    def remove(name: str) -> None:
        path = Path(models.where) / name
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{path}: cannot be removed: {error.strerror}") from error

    return remove
