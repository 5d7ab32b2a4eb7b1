"""Compares two versions: tables added, removed and changed, and how their rows changed.

Tables with equal checksums are not read. Other tables are read in blocks of rows, so memory does
not grow with their size. Rows are compared by number. Never imports torch, never writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from embedserve_store.comparison.row_diff import RowComparison, RowDiff
from embedserve_store.format.layout import layout_changes
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.format.tables_file import Progress

if TYPE_CHECKING:
    from embedserve_store.model_version import ModelVersion
    from embedserve_store.plans.plan import Plan


@dataclass(frozen=True)
class TableDiff:
    """Difference of a table that both versions have."""

    before: TableSpec
    after: TableSpec
    changes: tuple[str, ...]
    """Readable differences other than rows and layout, such as "dtype float32 to int8"."""
    rows: RowDiff | None
    """Difference of the rows; None if the dims differ, so that rows cannot be compared."""

    @property
    def is_changed(self) -> bool:
        return bool(self.changes) or self.rows is None or self.rows.rows_changed > 0


@dataclass(frozen=True)
class VersionDiff:
    """Difference of a version, called after, from another version, called before."""

    added: tuple[TableSpec, ...]
    removed: tuple[TableSpec, ...]
    tables: tuple[TableDiff, ...]
    """Differences of the tables that both versions have, in the order of after."""
    layout: tuple[str, ...]
    """Readable differences of the layout."""
    plan: str
    """Readable differences of the plans; empty if the plans are equal."""

    @property
    def is_changed(self) -> bool:
        tables = any(table.is_changed for table in self.tables)
        return tables or bool(self.added or self.removed or self.layout or self.plan)


def compare(
    before: ModelVersion, after: ModelVersion, progress: Progress | None = None
) -> VersionDiff:
    """Returns how ``after`` differs from ``before``, which may be of another model or store.

    ``progress`` counts the bytes of ``after`` that are compared, or known to be equal.
    """
    old = {table.name: table for table in before.manifest.tables}
    new = {table.name: table for table in after.manifest.tables}
    tables = []
    bytes_done = 0
    for name in (name for name in new if name in old):
        rows = _compare_rows(before, after, name, bytes_done, progress)
        tables.append(TableDiff(old[name], new[name], _table_changes(old[name], new[name]), rows))
        bytes_done += new[name].nbytes
    return VersionDiff(
        added=tuple(table for table in new.values() if table.name not in old),
        removed=tuple(table for table in old.values() if table.name not in new),
        tables=tuple(tables),
        layout=layout_changes(before.manifest, after.manifest),
        plan=_plan_change(before.plan, after.plan),
    )


def _compare_rows(
    before: ModelVersion,
    after: ModelVersion,
    name: str,
    bytes_before: int,
    progress: Progress | None,
) -> RowDiff | None:
    old, new = before.tables.tables[name], after.tables.tables[name]
    if old.embedding_dim != new.embedding_dim:
        return None
    total = min(old.num_embeddings, new.num_embeddings)

    def report(rows_done: int) -> None:
        if progress:
            progress(name, rows_done, total, bytes_before + rows_done * new.row_bytes)

    if _stored(old) == _stored(new):
        report(total)
        return RowDiff(total)
    comparison = RowComparison(old, new)
    old_rows, new_rows = before.tables.rows(name), after.tables.rows(name)
    for start in range(0, total, comparison.block_rows):
        stop = min(start + comparison.block_rows, total)
        comparison.add(old_rows[start:stop], new_rows[start:stop])
        report(stop)
    return comparison.result()


def _stored(table: TableSpec) -> tuple[object, ...]:
    return table.sha256, table.dtype, table.num_embeddings, table.embedding_dim


def _table_changes(old: TableSpec, new: TableSpec) -> tuple[str, ...]:
    pairs = {
        "rows": (f"{old.num_embeddings:,}", f"{new.num_embeddings:,}"),
        "dtype": (old.dtype, new.dtype),
    }
    changes = [f"{what} {a} to {b}" for what, (a, b) in pairs.items() if a != b]
    if "map" == old.ids.rule == new.ids.rule and old.ids.sha256 != new.ids.sha256:
        changes.append(
            f"a vocabulary of {old.ids.entries:,} ids to another of {new.ids.entries:,}: a row may "
            "stand for another id"
        )
    return tuple(changes)


def _plan_change(old: Plan, new: Plan) -> str:
    changes = []
    if old.world_size != new.world_size:
        changes.append(f"{old.world_size} to {new.world_size} ranks")
    if _part_count(old) != _part_count(new):
        changes.append(f"{_part_count(old)} to {_part_count(new)} parts")
    elif old.hosts != new.hosts:
        changes.append("other rows on the parts")
    moved = []
    for name in (name for name in new.tables if name in old.tables):
        a, b = old.tables[name], new.tables[name]
        if a.sharding_type != b.sharding_type:
            changes.append(f"{name} {a.sharding_type} to {b.sharding_type}")
        elif a != b:
            moved.append(name)
    if moved:
        changes.append(f"other shards of {', '.join(moved)}")
    if old.constraints != new.constraints:
        changes.append("other constraints")
    return "; ".join(changes)


def _part_count(plan: Plan) -> int | str:
    return "no" if plan.hosts is None else plan.hosts.parts
