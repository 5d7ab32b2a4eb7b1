"""Derives the manifest of a part from the published manifest. Never imports torch."""

from __future__ import annotations

from dataclasses import replace

from embedserve_store.format.manifest import Manifest
from embedserve_store.plans.host_plan import HostPlan
from embedserve_store.plans.part_plan import part_tables


def part_manifest(manifest: Manifest, hosts: HostPlan, number: int) -> Manifest:
    """Returns the manifest of part ``number``: its tables with the rows that they have there.

    Tables without rows on the part are left out. Ids are row numbers of the part, and other ids are
    errors. A mean becomes a sum, which the caller adds up over the parts and divides. The sha256 of
    a table is that of the part's rows.
    """
    checksums = manifest.part_checksums
    tables = tuple(
        replace(table, sha256=checksums[table.name][number] if checksums else "")
        for table in part_tables(manifest.tables, hosts, number)
    )
    return replace(manifest, tables=tables, part_checksums={})
