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


def _grid(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    grid = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        grid.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    return grid


def _show_models(store: ModelStore, path: Path) -> None:
    grid = _grid(
        f"store {path}",
        "model",
        "versions",
        "tables",
        "rows",
        "bytes",
        numbers=("tables", "rows", "bytes"),
    )
    for name in store.models():
        versions = store.versions(name)
        manifest = store.load(name).manifest
        grid.add_row(name, ", ".join(map(str, versions)), *_totals(manifest))
    out.print(grid if grid.row_count else f"store {path}: no models")


def _show_versions(store: ModelStore, model: str) -> None:
    grid = _grid(
        f"model {model}",
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
    out.print(grid)


def _totals(manifest: Manifest) -> tuple[str, str, str]:
    rows = sum(table.num_embeddings for table in manifest.tables)
    return str(len(manifest.tables)), f"{rows:,}", human_bytes(manifest.nbytes)


def _show_version(version: ModelVersion) -> None:
    manifest = version.manifest
    numbers = ("rows", "dim", "bytes")
    tables = _grid(
        f"model {manifest.model} version {manifest.version}",
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
    out.print(tables)
    out.print()
    out.print(_plan_grid(manifest, version.plan))


def _plan_grid(manifest: Manifest, plan: Plan) -> Table:
    """A line a table, a column a rank: which rows (and columns, where not all) lie there."""
    ranks = [f"rank {rank}" for rank in range(plan.world_size)]
    grid = _grid(f"plan over {plan.world_size} ranks", "table", *ranks)
    totals = [0] * plan.world_size
    for table in manifest.tables:
        cells = [""] * plan.world_size
        for shard in plan.tables[table.name].shards:
            cell = f"rows {shard.row_offset:,}-{shard.row_offset + shard.row_count - 1:,}"
            if not shard.row_count:
                cell = "no rows"
            elif shard.col_count < table.embedding_dim:
                cell += f" cols {shard.col_offset}-{shard.col_offset + shard.col_count - 1}"
            cells[shard.rank] = f"{cells[shard.rank]}; {cell}" if cells[shard.rank] else cell
            totals[shard.rank] += round(
                table.nbytes * shard.area / (table.num_embeddings * table.embedding_dim)
            )
        grid.add_row(table.name, *cells)
    grid.add_row("bytes", *map(human_bytes, totals))
    return grid
