"""Lists and opens published versions, and rejects versions whose files were changed.

Loading reads the small files whole and maps the tables, so its time does not grow with the tables.
verification.py reads every byte. Never imports torch or writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from embedserve_store.errors import (
    StoreError,
    UnreachableError,
    missing_model,
    missing_version,
    unreadable,
)
from embedserve_store.format.json_fields import parse_json
from embedserve_store.format.manifest import Manifest, parse_manifest
from embedserve_store.format.table_spec import NAME_PATTERN, check_model_name
from embedserve_store.format.tables_file import TablesFile
from embedserve_store.format.version_folder import version_numbers
from embedserve_store.ids.id_map import open_id_maps
from embedserve_store.model_version import ModelVersion
from embedserve_store.parts.local_tables import local_tables
from embedserve_store.parts.part import LocalTables, Part, RowSelection, check_selection
from embedserve_store.parts.part_manifest import part_manifest
from embedserve_store.plans.part_plan import part_plan
from embedserve_store.plans.plan import Plan
from embedserve_store.transfer.stored_version import (
    StoredVersion,
    check_small_files,
    read_file,
    version_in_folder,
)
from embedserve_store.writing.version_lock import VersionLock, lock_shared


class LocalStore:
    """Folder of published models: STORE/MODEL/VERSION/. ModelStore describes the methods.

    Args:
        selection: rows of the versions that ``load`` opens.
    """

    def __init__(self, path: str | os.PathLike[str], selection: RowSelection = None) -> None:
        self.path = Path(path)
        self._selection = selection

    def models(self) -> list[str]:
        """Returns the names of the models; raises StoreError also for the folder of a model."""
        names = sorted(name for name in _listed(self.path, "store") if NAME_PATTERN.fullmatch(name))
        models = [name for name in names if (self.path / name).is_dir() and self.versions(name)]
        if not models and self._is_folder_of_model():
            raise StoreError(
                f"{self.path}: this is the folder of a model; name the store, which is its parent"
            )
        return models

    def _is_folder_of_model(self) -> bool:
        numbers = version_numbers(self.path)
        return any((self.path / str(number) / "manifest.json").is_file() for number in numbers)

    def versions(self, model: str) -> list[int]:
        """Returns the versions of ``model``. Other entries of its folder are ignored."""
        _listed(self.path, "store")
        check_model_name(model, str(self.path))
        folder = self.path / model
        if not folder.exists():
            raise missing_model(self.path, model, self.models())
        _listed(folder, "model")
        return [number for number in version_numbers(folder) if (folder / str(number)).is_dir()]

    def load(self, model: str, version: int | None = None) -> ModelVersion:
        """Opens a version of ``model``, by default the highest."""
        chosen = self._find(model, version)
        return _load(self.path / model / str(chosen), model, chosen, self._selection)

    def manifest(self, model: str, version: int | None = None) -> Manifest:
        """Reads the manifest of a version, by default the highest."""
        chosen = self._find(model, version)
        return _read_manifest(self.path / model / str(chosen) / "manifest.json", model, chosen)

    def stored(self, model: str, version: int | None = None) -> StoredVersion:
        """Returns a version, by default the highest, as files to transfer."""
        return version_in_folder(self.path / model / str(self._find(model, version)))

    def files_beside(self, model: str, what: str) -> list[str]:
        """Returns the paths NAME/FILE in the folder ``what`` beside the versions."""
        folder = self.path / model / what
        if not os.path.isdir(folder):
            self.versions(model)  # raises if the store or the model does not exist
            return []
        return [
            f"{name}/{file}"
            for name in _listed(folder, what)
            if (folder / name).is_dir()
            for file in _listed(folder / name, what)
        ]

    def names_beside(self, model: str, path: str) -> Iterator[str]:
        """Yields the names of the files in a folder beside the versions, one at a time."""
        folder = self.path / model / path
        try:
            with os.scandir(folder) as entries:
                yield from (entry.name for entry in entries)
        except FileNotFoundError:
            self.versions(model)  # raises if the store or the model does not exist
        except OSError as error:
            raise unreadable(folder, f"the folder {path} cannot be read", error) from error

    def modified_s(self, path: str) -> float | None:
        """Returns when the file at ``path`` was written, in seconds since the Unix epoch."""
        file = self.path / path
        try:
            return file.stat().st_mtime
        except OSError as error:
            raise unreadable(file, "cannot be read", error) from error

    def folders(self, path: str) -> list[str]:
        """Returns the names of the folders at ``path`` in the store; empty if there are none."""
        _listed(self.path, "store")
        folder = self.path / path
        try:
            names = _listed(folder, path)
        except UnreachableError:
            raise
        except StoreError:
            return []
        return [name for name in names if (folder / name).is_dir()]

    def files(self, path: str) -> list[str]:
        """Returns the names of the files in the folder at ``path``, which exists."""
        return _listed(self.path / path, path)

    def read(self, path: str, bytes_max: int) -> bytes:
        """Reads the file at ``path``; raises StoreError as read_file."""
        return read_file(self.path / path, bytes_max)

    def _find(self, model: str, version: int | None) -> int:
        check_model_name(model, str(self.path))
        folder = self.path / model
        if version is not None and os.path.isdir(folder / str(version)):
            return version  # without a listing, whose time grows with the number of versions
        versions = self.versions(model)
        if not versions:
            raise StoreError(f"{folder}: no version is published")
        chosen = versions[-1] if version is None else version
        if chosen not in versions:
            raise missing_version(folder, chosen, versions)
        return chosen


def _listed(folder: Path, what: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise unreadable(folder, f"the {what} cannot be read", error, StoreError) from error


def _load(path: Path, model: str, version: int, selection: RowSelection) -> ModelVersion:
    lock = lock_shared(path)
    manifest = _read_manifest(path / "manifest.json", model, version)
    check_small_files(path, manifest)
    plan_path = path / "plan.json"
    plan = Plan.from_json(parse_json(read_file(plan_path), str(plan_path)), str(plan_path))
    plan.check(manifest.tables, str(plan_path))
    if selection is not None:
        check_selection(plan, selection, str(path))
    if isinstance(selection, Part):
        return _load_part(path, manifest, plan, selection, lock)
    file = path / "tables.safetensors"
    if isinstance(selection, LocalTables):
        tables = _open_local(file, manifest, plan, selection)
    else:
        tables = TablesFile.open(file, manifest.tables)
    id_maps = open_id_maps(path / "ids.safetensors", manifest.tables)
    loaded = ModelVersion(path, manifest, plan, tables, id_maps, lock, selection=selection)
    loaded.goldens()
    return loaded


def _open_local(path: Path, manifest: Manifest, plan: Plan, selection: LocalTables) -> TablesFile:
    """Maps the tables that a router holds. Opens no file if there are none."""
    assert plan.hosts is not None
    local = local_tables(manifest.tables, plan.hosts, selection.bytes_max)
    if not local:
        return TablesFile.without_rows(path)
    return TablesFile.open_ranges(
        path, manifest.tables, local, dict.fromkeys((table.name for table in local), 0)
    )


def _load_part(
    path: Path, whole: Manifest, plan: Plan, part: Part, lock: VersionLock | None
) -> ModelVersion:
    hosts = plan.hosts
    assert hosts is not None
    found = len(next(iter(whole.part_checksums.values()), ()))
    if found != hosts.parts:
        raise StoreError(
            f"{path}: the manifest has checksums of {found} parts, expected {hosts.parts}"
        )
    manifest = part_manifest(whole, hosts, part.number)
    first_rows = {table.name: hosts.rows[table.name][part.number] for table in manifest.tables}
    tables = TablesFile.open_ranges(
        path / "tables.safetensors", whole.tables, manifest.tables, first_rows
    )
    return ModelVersion(
        path,
        manifest,
        part_plan(plan, manifest.tables),
        tables,
        {},
        lock,
        selection=part,
        published=whole,
    )


def _read_manifest(path: Path, model: str, version: int) -> Manifest:
    manifest = parse_manifest(read_file(path), str(path))
    manifest.check_place(model, version, str(path))
    return manifest
