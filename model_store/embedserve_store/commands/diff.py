"""`embedserve diff`: the differences between two versions, as a table for a person."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embedserve_store import ModelVersion, StoreError
from embedserve_store.comparison.version_diff import TableDiff, VersionDiff, compare
from embedserve_store.terminal.aligned_columns import grid, show, write
from embedserve_store.terminal.console import table_progress
from embedserve_store.terminal.stores import load_version

NUMBERS = ("rows", "changed", "share", "drift mean", "drift max", "at row", "cosine mean")
"""Columns of numbers about the rows that both versions have. Drift is a changed row's relative L2
distance, |after - before| / |before|."""


VersionName = tuple[str, str, str]
"""Store, model and version of a version, which is a number or an alias."""


def diff(names: Sequence[str], cache: Path | None) -> bool:
    """Prints how the second version of ``names`` differs from the first. Returns whether their
    layouts are the same.

    Args:
        names: STORE MODEL A B, or STORE/MODEL/VERSION twice.

    Raises:
        StoreError: a name is malformed, or its version does not exist or is damaged.
    """
    before, after = (
        load_version(store, cache, model, version) for store, model, version in parse(names)
    )
    with table_progress() as progress:
        found = compare(before, after, progress)
    report(before, after, found)
    return not found.layout


def parse(names: Sequence[str]) -> tuple[VersionName, VersionName]:
    """Parses the two version names given on the command line.

    >>> parse(["store", "m", "1", "2"])[1]
    ('store', 'm', '2')
    >>> parse(["s3://bucket/store/m/1", "store/m/2/"])[0]
    ('s3://bucket/store', 'm', '1')
    """
    if len(names) == 4:
        store, model, a, b = names
        return (store, model, a), (store, model, b)
    if len(names) == 2:
        first, second = (tuple(name.rstrip("/").rsplit("/", 2)) for name in names)
        if len(first) == len(second) == 3:
            return first, second
    raise StoreError(
        f"{' '.join(names)}: expected STORE MODEL A B, or two times STORE/MODEL/VERSION"
    )


def report(before: ModelVersion, after: ModelVersion, found: VersionDiff) -> None:
    """Prints a row for each table that both versions have, then a line for every other
    difference."""
    table = grid("table", *NUMBERS, numbers=NUMBERS)
    for one in found.tables:
        table.add_row(one.after.name, *_cells(one))
    show(f"{_title(before)} to {_title(after)}", table)
    for spec in found.added:
        write(f"{spec.name}: added, {spec.num_embeddings:,} rows of {spec.embedding_dim}")
    for spec in found.removed:
        write(f"{spec.name}: removed, {spec.num_embeddings:,} rows of {spec.embedding_dim}")
    for one in found.tables:
        for note in _notes(one):
            write(f"{one.after.name}: {note}")
    for line in found.layout:
        write(f"layout: {line}")
    write(f"plan: {found.plan or 'the same'}")
    if not found.is_changed:
        write("nothing differs")


def _title(version: ModelVersion) -> str:
    return f"{version.manifest.model} version {version.manifest.version}"


def _cells(table: TableDiff) -> list[str]:
    """Returns the cells of NUMBERS; a dash where a number does not apply."""
    rows = table.rows
    if rows is None:
        return ["-"] * len(NUMBERS)
    cells = [f"{rows.rows:,}", f"{rows.rows_changed:,}", f"{rows.share_changed:.2%}"]
    if rows.row_max is None:
        return [*cells, "-", "-", "-", "-"]
    return [
        *cells,
        f"{rows.relative_l2_mean:.4f}",
        f"{rows.relative_l2_max:.4f}",
        f"{rows.row_max:,}",
        f"{rows.cosine_mean:.4f}",
    ]


def _notes(table: TableDiff) -> list[str]:
    from_zero = table.rows.rows_from_zero if table.rows else 0
    return [*table.changes, *([f"{from_zero:,} rows were zero before"] if from_zero else [])]
