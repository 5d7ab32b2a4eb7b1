"""Derives the manifest of a part from the published manifest. Never imports torch."""

from __future__ import annotations

from dataclasses import replace

from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.host_plan import HostPlan
from embedserve_store.plans.part_plan import part_tables


def part_manifest(manifest: Manifest, hosts: HostPlan, number: int) -> Manifest:
    """Returns the manifest of part ``number``: its tables with the rows that they have there.

    Tables without rows on the part are left out. Ids are row numbers of the part, and other ids are
    errors. A mean becomes a sum, which the caller adds up over the parts and divides. The sha256 of
    a table is that of the part's rows.
    """
    tables = tuple(
        replace(table, sha256=_part_sha256(manifest, table, number))
        for table in part_tables(manifest.tables, hosts, number)
    )
    return replace(manifest, tables=tables, part_checksums={})


def _part_sha256(manifest: Manifest, table: TableSpec, number: int) -> str:
    """Returns the checksum of the rows ``table`` of part ``number``; "" if there is none."""
    whole = next(one for one in manifest.tables if one.name == table.name)
    if table.num_embeddings == whole.num_embeddings:
        return whole.sha256
    checksums = manifest.part_checksums
    return checksums[table.name][number] if checksums else ""
