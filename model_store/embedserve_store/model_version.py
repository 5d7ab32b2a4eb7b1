"""One published version that was opened: what is known of it, and its rows.

local_store.py opens it, which checks it. Never imports torch, never writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from embedserve_store.errors import StoreError
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.tables_file import TablesFile
from embedserve_store.goldens.goldens_file import Goldens, load_goldens
from embedserve_store.ids.id_map import IdMap
from embedserve_store.ids.translate import IdTranslator
from embedserve_store.plans.plan import Plan
from embedserve_store.writing.version_lock import VersionLock


@dataclass(frozen=True)
class ModelVersion:
    """One published version, checked, its tables mapped."""

    path: Path
    manifest: Manifest
    plan: Plan
    tables: TablesFile
    id_maps: Mapping[str, IdMap]
    """Of the tables whose id rule is map, mapped too."""
    hold: VersionLock | None = field(default=None, compare=False, repr=False)
    """What keeps it from being removed."""

    @cached_property
    def translator(self) -> IdTranslator:
        return IdTranslator(self.manifest, self.id_maps)

    def goldens(self) -> Goldens:
        """Raises StoreError: the file is no longer as it was published."""
        path = self.path / "goldens.safetensors"
        try:
            return load_goldens(path, self.manifest, self.translator)
        except IndexError as error:
            ids = self.path / "ids.safetensors"
            raise StoreError(f"{ids}: damaged: a position in it is outside it: {error}") from error
