"""`embedserve inspect`: what a store, a model or a version holds, as tables for a person."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from embedserve.commands.sizes import human_bytes
from embedserve_store.load import ModelStore, ModelVersion
from embedserve_store.manifest import Manifest
from embedserve_store.plan import Plan

out = Console(highlight=False)


def inspect(store: Path, model: str, version: int) -> None:
    """Prints the models of a store, the versions of a model or, with both, one version.

    Raises:
        StoreError: there is no such store, model or version, or it is damaged.
    """
    opened = ModelStore(store)
    if not model:
        _show_models(opened, store)
    elif not version:
        _show_versions(opened, model)
    else:
        _show_version(opened.load(model, version))


def _show(title: str, grid: Table) -> None:
    """The title on a line of its own: as part of the grid it would wrap to the grid's width."""
    out.print(title, style="italic", soft_wrap=True, markup=False)
    out.print(grid)


def _grid(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        grid.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    return grid


def _show_models(store: ModelStore, path: Path) -> None:
    numbers = ("tables", "rows", "bytes")
    grid = _grid("model", "versions", *numbers, numbers=numbers)
    for name in store.models():
        versions = store.versions(name)
        manifest = store.load(name).manifest
        grid.add_row(name, ", ".join(map(str, versions)), *_totals(manifest))
    if grid.row_count:
        _show(f"store {path}", grid)
    else:
        out.print(f"store {path}: no models", soft_wrap=True, markup=False)


def _show_versions(store: ModelStore, model: str) -> None:
    grid = _grid(
        "version",
        "tables",
        "rows",
        "bytes",
        "published",
        "ranks",
        numbers=("version", "tables", "rows", "bytes", "ranks"),
    )
    for number in store.versions(model):
        version = store.load(model, number)
        published = str(version.manifest.source.get("published_at", ""))
        ranks = str(version.plan.world_size)
        grid.add_row(str(number), *_totals(version.manifest), published, ranks)
    _show(f"model {model}", grid)


def _totals(manifest: Manifest) -> tuple[str, str, str]:
    rows = sum(table.num_embeddings for table in manifest.tables)
    return str(len(manifest.tables)), f"{rows:,}", human_bytes(manifest.nbytes)


def _show_version(version: ModelVersion) -> None:
    manifest = version.manifest
    numbers = ("rows", "dim", "bytes")
    tables = _grid(
        "table",
        "rows",
        "dim",
        "dtype",
        "pooling",
        "bytes",
        "features",
        "sharding",
        numbers=numbers,
    )
    for table in manifest.tables:
        tables.add_row(
            table.name,
            f"{table.num_embeddings:,}",
            str(table.embedding_dim),
            table.dtype,
            table.pooling,
            human_bytes(table.nbytes),
            ", ".join(table.feature_names),
            version.plan.tables[table.name].sharding_type,
        )
    _show(f"model {manifest.model} version {manifest.version}", tables)
    out.print()
    show_plan(manifest, version.plan)


def show_plan(manifest: Manifest, plan: Plan) -> None:
    """A line a table, a column a rank: which rows lie there."""
    grid = _grid("table", *(f"rank {rank}" for rank in range(plan.world_size)))
    for table in manifest.tables:
        cells = [""] * plan.world_size
        for shard in plan.tables[table.name].shards:
            cell = f"rows {shard.row_offset:,}-{shard.row_offset + shard.row_count - 1:,}"
            if not shard.row_count:
                cell = "no rows"
            cells[shard.rank] = f"{cells[shard.rank]}; {cell}" if cells[shard.rank] else cell
        grid.add_row(table.name, *cells)
    grid.add_row("bytes", *map(human_bytes, plan.bytes_per_rank(manifest.tables)))
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    _show(f"plan over {ranks}", grid)
