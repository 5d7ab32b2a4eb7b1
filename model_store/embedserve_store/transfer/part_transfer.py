"""Selects the files and the ranges of rows of a version that a process holds, for a transfer.

Never imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from embedserve_store.format.manifest import Manifest
from embedserve_store.format.tables_file import file_order, header_bytes
from embedserve_store.parts.local_tables import local_tables, with_local_part
from embedserve_store.parts.part import LocalTables, Part, check_selection
from embedserve_store.parts.part_manifest import part_manifest
from embedserve_store.plans.host_plan import HostPlan
from embedserve_store.transfer.file_check import IDS, TABLES, FileLayout
from embedserve_store.transfer.stored_version import FileRange, StoredVersion


def select_rows(version: StoredVersion, selection: Part | LocalTables) -> StoredVersion:
    """Returns ``version`` with only the files and ranges that ``selection`` has.

    Reads the plan from the store of the version.

    Raises:
        StoreError: the plan is damaged, or does not have the part.
        UnreachableError: the store stopped responding.
    """
    plan = version.plan()
    check_selection(plan, selection, version.where)
    manifest, hosts = version.manifest, plan.hosts
    assert hosts is not None
    if isinstance(selection, Part):
        left_out, ranges = {TABLES, IDS}, part_ranges(manifest, hosts, selection.number)
    else:
        local = [one.name for one in local_tables(manifest.tables, hosts, selection.bytes_max)]
        left_out = {TABLES}
        ranges = part_ranges(manifest, with_local_part(hosts, local), hosts.parts)
    files = {name: size for name, size in version.files.items() if name not in left_out}
    return replace(version, files=files, selection=selection, ranges=ranges)


def part_ranges(manifest: Manifest, hosts: HostPlan, number: int) -> tuple[FileRange, ...]:
    """Returns the ranges of tables.safetensors with the rows of part ``number``, without header.

    Tables whose rows follow each other in the file are in one range.
    """
    tables = part_manifest(manifest, hosts, number).tables
    checksums = {table.name: table.sha256 for table in tables}
    spans: list[tuple[int, int, str]] = []
    start = len(header_bytes(manifest.tables))
    for table in file_order(manifest.tables):
        rows = hosts.rows_on(table.name, number)
        if rows:
            first = start + rows.start * table.row_bytes
            spans.append((first, start + rows.stop * table.row_bytes, table.name))
        start += table.nbytes
    cuts = [at for at, (one, other) in enumerate(pairwise(spans), 1) if one[1] != other[0]]
    return tuple(
        FileRange(
            joined[0][0],
            FileLayout(
                tuple((name, stop - first) for first, stop, name in joined),
                {name: checksums[name] for _, _, name in joined},
            ),
        )
        for joined in (spans[one:other] for one, other in pairwise([0, *cuts, len(spans)]))
        if joined
    )
