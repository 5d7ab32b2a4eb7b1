"""What the bytes of a version must hash to: the seal of its manifest, and ``verify``.

The manifest holds the sha256 of every other file or table, and its own. load.py checks what it
reads whole; ``verify`` reads every byte of every file. Never imports torch, never writes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedserve_store.errors import StoreError
from embedserve_store.ids.id_map import IdMaps
from embedserve_store.manifest import CHECKED_FILES
from embedserve_store.safetensors_file import encode_header
from embedserve_store.staging import to_json_bytes
from embedserve_store.table_spec import TableSpec
from embedserve_store.tables_file import BLOCK_BYTES, Progress, TablesFile, header_bytes

if TYPE_CHECKING:
    from embedserve_store.load import ModelVersion

SEAL = "sha256"
"""The manifest's last field: the sha256 of the file's bytes while it is BLANK."""
BLANK = "0" * 64
HEADER_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its JSON header."""
UNSEALED_FORMAT_VERSION = 1
"""Manifests of this format version have no seal."""


def sealed_json(data: Mapping[str, Any]) -> bytes:
    """``data`` as the bytes of manifest.json, sealed anew if it was sealed."""
    unsealed = {key: value for key, value in data.items() if key != SEAL}
    blank = to_json_bytes(unsealed | {SEAL: BLANK})
    before, _, after = blank.rpartition(BLANK.encode())
    return before + hashlib.sha256(blank).hexdigest().encode() + after


def is_sealed(text: bytes) -> bool:
    """False for the manifest.json (``text``) of a format version that had no seal yet."""
    data = json.loads(text)
    return SEAL in data or data.get("format_version") != UNSEALED_FORMAT_VERSION


def check_seal(text: bytes, where: str) -> None:
    """Raises StoreError, led by ``where``, where a byte of manifest.json (``text``, known to be
    a JSON object) is not as it was published; a manifest without a seal passes."""
    if not is_sealed(text):
        return
    digest = json.loads(text).get(SEAL)
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise StoreError(f"{where}: {SEAL} is {digest!r}, expected 64 hexadecimal digits")
    blank = text.replace(digest.encode(), BLANK.encode())
    check_sha256(hashlib.sha256(blank).hexdigest(), digest, where)


def check_sha256(found: str, expected: str, where: str) -> None:
    """Raises StoreError, led by ``where``, unless the two are equal."""
    if found != expected:
        raise StoreError(
            f"{where}: sha256 is {found}, the manifest has {expected}: changed since it was "
            "published"
        )


def verify(version: ModelVersion, progress: Progress | None = None) -> None:
    """Reads every byte of ``version`` and compares it with the checksums in its manifest.

    Of a version of format version 1 the manifest itself has no checksum.

    Raises:
        StoreError: a file or table is not as it was published.
    """
    manifest_path = version.path / "manifest.json"
    check_seal(_read(manifest_path), str(manifest_path))
    for name in CHECKED_FILES:
        found = hashlib.sha256(_read(version.path / name)).hexdigest()
        check_sha256(found, version.manifest.files[name], str(version.path / name))
    tables = version.tables
    _check_header(tables.path, header_bytes(tuple(tables.tables.values())))
    _verify_id_maps(version)
    bytes_before = 0
    for name in version.tables.offsets:
        table = version.tables.tables[name]
        found = _table_sha256(version.tables, table, bytes_before, progress)
        check_sha256(found, table.sha256, f"{version.tables.path}: table {name!r}")
        bytes_before += table.nbytes


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def _verify_id_maps(version: ModelVersion) -> None:
    if not version.id_maps:
        return
    path = version.path / "ids.safetensors"
    IdMaps.open(path, version.manifest.tables).verify()
    # Opening has compared what the header says; this is about the spaces around it.
    data = _read_header(path)
    _check_header(path, encode_header(json.loads(data[HEADER_LENGTH_BYTES:])))


def _check_header(path: Path, expected: bytes) -> None:
    """A header says nothing that the manifest does not, so it needs no checksum."""
    if _read_header(path) != expected:
        raise StoreError(f"{path}: its header is not as it was published")


def _read_header(path: Path) -> bytes:
    """Everything in front of the data of a safetensors file."""
    try:
        with open(path, "rb") as file:
            length = file.read(HEADER_LENGTH_BYTES)
            return length + file.read(int.from_bytes(length, "little"))
    except (OSError, OverflowError) as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error


def _table_sha256(
    tables: TablesFile, table: TableSpec, bytes_before: int, progress: Progress | None
) -> str:
    digest = hashlib.sha256()
    rows = tables.rows(table.name)
    step = max(1, BLOCK_BYTES // table.row_bytes)
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        digest.update(block.data)
        if progress:
            rows_done = start + len(block)
            bytes_done = bytes_before + rows_done * table.row_bytes
            progress(table.name, rows_done, len(rows), bytes_done)
    return digest.hexdigest()
