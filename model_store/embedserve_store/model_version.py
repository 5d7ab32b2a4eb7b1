"""An opened version: its manifest, plan, rows and goldens.

local_store.py opens and checks it. Never imports torch, never writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from embedserve_store.errors import StoreError
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.tables_file import TablesFile
from embedserve_store.goldens.goldens_file import Goldens, load_goldens
from embedserve_store.goldens.reference_pooling import pool_stored
from embedserve_store.goldens.sampled_bags import sample_bags
from embedserve_store.ids.id_map import IdMap
from embedserve_store.ids.translate import IdTranslator
from embedserve_store.parts.local_tables import with_local_part
from embedserve_store.parts.part import Part, RowSelection
from embedserve_store.parts.part_manifest import part_manifest
from embedserve_store.plans.part_plan import part_plan
from embedserve_store.plans.plan import Plan
from embedserve_store.writing.version_lock import VersionLock


@dataclass(frozen=True)
class ModelVersion:
    """A published version that has been checked, with its tables mapped."""

    path: Path
    manifest: Manifest
    plan: Plan
    tables: TablesFile
    id_maps: Mapping[str, IdMap]
    """Id maps of the tables whose id rule is "map", by table name; mapped from ids.safetensors."""
    lock: VersionLock | None = field(default=None, compare=False, repr=False)
    """Lock that prevents the removal of the version."""
    at_seq: int | None = None
    """Last delta whose rows may be served, where the version was opened by an alias that names one;
    else None."""
    selection: RowSelection = None
    """Rows that were opened: a part, a router's tables, or all (None). ``manifest``, ``plan`` and
    ``tables`` are those of the part. In a router only ``tables`` has fewer tables."""
    published: Manifest | None = None
    """Manifest of the whole version, if ``manifest`` is that of a part; else None."""

    @property
    def part(self) -> Part | None:
        """Returns the part of the version that was opened; None for all of it, or a router's."""
        return self.selection if isinstance(self.selection, Part) else None

    @property
    def whole(self) -> Manifest:
        """Returns the manifest as it was published, with all tables."""
        return self.manifest if self.published is None else self.published

    def local_version(self) -> ModelVersion | None:
        """Returns the tables of a router's version as a version of one rank, whose tables have
        sums; None if there are none.

        Ids are row numbers. Goldens are sampled from the rows, as those of a part.
        """
        hosts, local = self.plan.hosts, self.tables.tables.keys()
        if hosts is None or not local:
            return None
        manifest = part_manifest(self.manifest, with_local_part(hosts, local), hosts.parts)
        plan = part_plan(replace(self.plan, world_size=1), manifest.tables)
        return replace(self, manifest=manifest, plan=plan, id_maps={}, published=self.manifest)

    @cached_property
    def translator(self) -> IdTranslator:
        return IdTranslator(self.manifest, self.id_maps)

    def goldens(self) -> Goldens:
        """Reads the goldens; raises StoreError if the file has changed since it was published.

        Those of a version span all parts, so those of a part are sampled from its rows. Equal
        manifests give equal bags, and each table has its first and its last row that requests can
        reach in them. Both results are those of the stored rows: the source model's results for
        these bags are unknown.
        """
        if self.published is not None:
            bags = sample_bags(self.manifest, {})
            results = pool_stored(self.manifest, bags, bags.ids, self.tables)
            return Goldens(bags, results, results)
        path = self.path / "goldens.safetensors"
        try:
            return load_goldens(path, self.manifest, self.translator)
        except IndexError as error:
            ids = self.path / "ids.safetensors"
            raise StoreError(f"{ids}: damaged: a position in it is outside it: {error}") from error
