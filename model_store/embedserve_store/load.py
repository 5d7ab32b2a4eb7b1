"""Opens published versions, and refuses what is not exactly as it was published.

``ModelStore`` lists and loads; loading reads the small files whole and maps the tables, so its
time does not grow with them. ``verify`` reads every byte. Never imports torch, never writes.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedserve_store.errors import StoreError
from embedserve_store.goldens import Goldens, load_goldens
from embedserve_store.manifest import CHECKED_FILES, NAME_PATTERN, Manifest, TableSpec
from embedserve_store.plan import Plan
from embedserve_store.staging import version_numbers
from embedserve_store.tables_file import BLOCK_BYTES, Progress, TablesFile

SMALL_FILE_BYTES_MAX = 256 << 20
"""Manifest, plan and goldens are read whole; a larger one was not published by this code."""


@dataclass(frozen=True)
class ModelVersion:
    """One published version, checked, its tables mapped."""

    path: Path
    manifest: Manifest
    plan: Plan
    tables: TablesFile

    def goldens(self) -> Goldens:
        """Raises StoreError: the file is no longer as it was published."""
        return load_goldens(self.path / "goldens.safetensors", self.manifest)


class ModelStore:
    """A folder of published models: STORE/MODEL/VERSION/."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def models(self) -> list[str]:
        """Names of the models that have a version, sorted.

        Raises:
            StoreError: the store cannot be read.
        """
        names = sorted(name for name in _listed(self.path, "store") if NAME_PATTERN.fullmatch(name))
        return [name for name in names if (self.path / name).is_dir() and self.versions(name)]

    def versions(self, model: str) -> list[int]:
        """Published versions of ``model``, ascending; whatever else is in its folder is ignored.

        Raises:
            StoreError: the store or the model does not exist or cannot be read.
        """
        _listed(self.path, "store")
        if not NAME_PATTERN.fullmatch(model):
            raise StoreError(f"{self.path}: {model!r} is not the name of a model")
        folder = self.path / model
        _listed(folder, "model")
        return [number for number in version_numbers(folder) if (folder / str(number)).is_dir()]

    def load(self, model: str, version: int | None = None) -> ModelVersion:
        """One version of ``model``, the highest unless ``version`` says which.

        Raises:
            StoreError: it does not exist, or one of its files is missing, damaged, of another
                format version, or contradicts another. Table bytes are not read: see ``verify``.
        """
        versions = self.versions(model)
        folder = self.path / model
        if not versions:
            raise StoreError(f"{folder}: no version is published")
        chosen = versions[-1] if version is None else version
        if chosen not in versions:
            raise StoreError(f"{folder}: version {chosen} does not exist, there are {versions}")
        return _load(folder / str(chosen), model, chosen)


def _listed(folder: Path, what: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise StoreError(f"{folder}: the {what} cannot be read: {error.strerror}") from error


def _load(path: Path, model: str, version: int) -> ModelVersion:
    manifest_path = path / "manifest.json"
    manifest = Manifest.from_json(_parsed(_read(manifest_path), manifest_path), str(manifest_path))
    if (manifest.model, manifest.version) != (model, version):
        raise StoreError(
            f"{manifest_path}: is of model {manifest.model!r} version {manifest.version}, "
            f"but lies in the folder of {model!r} version {version}"
        )
    _check_files(path, manifest)
    plan_path = path / "plan.json"
    plan = Plan.from_json(_parsed(_read(plan_path), plan_path), str(plan_path))
    plan.check(manifest.tables, str(plan_path))
    tables = TablesFile.open(path / "tables.safetensors", manifest.tables)
    loaded = ModelVersion(path, manifest, plan, tables)
    loaded.goldens()
    return loaded


def _check_files(path: Path, manifest: Manifest) -> None:
    for name in CHECKED_FILES:
        found = hashlib.sha256(_read(path / name)).hexdigest()
        _check_sha256(found, manifest.files[name], str(path / name))


def _check_sha256(found: str, expected: str, where: str) -> None:
    if found != expected:
        raise StoreError(
            f"{where}: sha256 is {found}, the manifest has {expected}: changed since it was "
            "published"
        )


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > SMALL_FILE_BYTES_MAX:
            raise StoreError(f"{path}: {size} bytes, the limit is {SMALL_FILE_BYTES_MAX}")
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def _parsed(data: bytes, path: Path) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: not JSON, or half-written: {error}") from error


def verify(version: ModelVersion, progress: Progress | None = None) -> None:
    """Reads every byte of ``version`` and compares it with the checksums in its manifest.

    Raises:
        StoreError: a file or table is not as it was published.
    """
    _check_files(version.path, version.manifest)
    bytes_before = 0
    for name in version.tables.offsets:
        table = version.tables.tables[name]
        found = _table_sha256(version.tables, table, bytes_before, progress)
        _check_sha256(found, table.sha256, f"{version.tables.path}: table {name!r}")
        bytes_before += table.nbytes


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
