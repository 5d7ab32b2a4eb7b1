"""Finds the bytes of a version that a version beside it in a remote store has, too.

An upload has the store copy these bytes, and sends the others. Never imports torch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from embedserve_store.errors import StoreError
from embedserve_store.format.manifest import Manifest, parse_manifest
from embedserve_store.format.tables_file import file_order, header_bytes
from embedserve_store.format.version_folder import VERSION_PATTERN
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.transfer.file_check import MANIFEST, TABLES
from embedserve_store.transfer.stored_version import SMALL_FILE_BYTES_MAX, StoredVersion

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnchangedBytes:
    """Ranges of a new object that an object of the store has, too."""

    path: str
    """Path of the object that has them."""
    ranges: tuple[tuple[int, int, int], ...]
    """Start and stop of each range in the new object, and its start in the other one."""

    def find(self, start: int, stop: int) -> int | None:
        """Returns where the object has bytes ``start`` to ``stop``; None if not all are there."""
        for first, last, at in self.ranges:
            if first <= start and stop <= last:
                return at + start - first
        return None


def find_unchanged(
    remote: RemoteFolder, version: StoredVersion, number: int
) -> UnchangedBytes | None:
    """Returns the bytes of tables.safetensors that the version before ``number`` has, too.

    Without a version before, the next one after ``number`` counts: a copy sends the newest first.
    Returns None if there are none, or if that version cannot be read: nothing depends on it.

    Args:
        version: the new version, which gets this number.
    """
    model = version.model
    try:
        # Lists folders only, because some stores read every object that they list.
        names = filter(VERSION_PATTERN.fullmatch, remote.folders(model))
        others = sorted({int(name) for name in names} - {number})
        if not others:
            return None
        beside = max((one for one in others if one < number), default=others[0])
        where = f"{model}/{beside}/{MANIFEST}"
        base = parse_manifest(remote.read(where, SMALL_FILE_BYTES_MAX), f"{remote.url}/{where}")
    except StoreError as error:
        logger.info("%s; all tables are sent", error)
        return None
    ranges = unchanged_ranges(version.manifest, base)
    return UnchangedBytes(f"{model}/{beside}/{TABLES}", ranges) if ranges else None


def unchanged_ranges(manifest: Manifest, base: Manifest) -> tuple[tuple[int, int, int], ...]:
    """Returns the ranges of the tables that are in both versions, as in UnchangedBytes.

    Tables that are neighbours in both files are one range.
    """
    there = {sha256: at for _, sha256, at, _ in _layout(base)}
    same_name = {(name, sha256): at for name, sha256, at, _ in _layout(base)}
    ranges: list[tuple[int, int, int]] = []
    for name, sha256, start, stop in _layout(manifest):
        at = same_name.get((name, sha256), there.get(sha256))
        if at is None:
            continue
        if ranges and ranges[-1][1] == start and ranges[-1][2] - ranges[-1][0] == at - start:
            ranges[-1] = ranges[-1][0], stop, ranges[-1][2]
        else:
            ranges.append((start, stop, at))
    return tuple(ranges)


def _layout(manifest: Manifest) -> list[tuple[str, str, int, int]]:
    """Returns name, sha256, start and stop of each table in tables.safetensors, in its order."""
    found = []
    start = len(header_bytes(manifest.tables))
    for table in file_order(manifest.tables):
        found.append((table.name, table.sha256, start, start + table.nbytes))
        start += table.nbytes
    return found
