"""Versions of an EmbeddingCollection, written file by file, and their expected rows."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from reference import Bags, to_kjt
from torchrec import EmbeddingCollection, EmbeddingConfig

from embedserve_store import Manifest, ModelStore, ModelVersion, TableSpec
from embedserve_store.format.manifest import CHECKED_FILES
from embedserve_store.format.manifest_checksum import sealed_json
from embedserve_store.format.row_layout import dequantize_rows, encode_rows
from embedserve_store.format.tables_file import TablesFile
from embedserve_store.goldens.goldens_file import Goldens, save_goldens
from embedserve_store.goldens.sampled_bags import sample_bags
from embedserve_store.plans.plan import Plan, Shard, TablePlan
from embedserve_store.publishing.tables_writer import write_tables

DIM = 32


def unpooled_collection(
    tables: Sequence[tuple[str, int, list[str]]], dim: int = DIM
) -> EmbeddingCollection:
    """Returns a collection of tables that are given as (name, rows, features)."""
    torch.manual_seed(4)
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features
            )
            for name, rows, features in tables
        ]
    )


def write_version(
    store: Path,
    ec: EmbeddingCollection,
    *,
    dtype: str | Mapping[str, str] = "float32",
    sharding: str | Mapping[str, str] = "table_wise",
    world_size: int = 1,
) -> ModelVersion:
    """Writes the next version of "rows" to ``store``.

    Args:
        dtype: of all tables, or by table.
        sharding: of all tables, or by table.
    """
    tables = tuple(
        TableSpec(
            config.name,
            config.num_embeddings,
            config.embedding_dim,
            tuple(config.feature_names),
            "none",
            dtype if isinstance(dtype, str) else dtype[config.name],
        )
        for config in ec.embedding_configs()
    )
    plan = Plan(
        world_size,
        {
            table.name: _table_plan(
                table,
                sharding if isinstance(sharding, str) else sharding[table.name],
                position,
                world_size,
            )
            for position, table in enumerate(tables)
        },
        {},
    )
    number = 1 + len(list(store.glob("rows/*")))
    folder = store / "rows" / str(number)
    folder.mkdir(parents=True)
    write_tables(
        folder / "tables.safetensors",
        tables,
        lambda table: [encode_rows(ec.embeddings[table.name].weight.detach(), table.dtype)],
    )
    manifest = Manifest("rows", number, tables, is_weighted=False)
    write_small_files(folder, manifest, plan, _goldens(folder, ec, manifest))
    return ModelStore(store).load("rows", number)


def _table_plan(table: TableSpec, sharding: str, position: int, world_size: int) -> TablePlan:
    """Returns the plan of a table.

    table_wise places each table on the next rank; row_wise splits like torchrec.
    """
    rows, dim = table.num_embeddings, table.embedding_dim
    if sharding == "data_parallel":
        return TablePlan(
            sharding, tuple(Shard(rank, 0, rows, 0, dim) for rank in range(world_size))
        )
    if sharding != "row_wise":
        return TablePlan(sharding, (Shard(position % world_size, 0, rows, 0, dim),))
    block = -(-rows // world_size)
    starts = [min(rank * block, rows) for rank in range(world_size + 1)]
    return TablePlan(
        "row_wise",
        tuple(
            Shard(rank, start, end - start, 0, dim)
            for rank, (start, end) in enumerate(pairwise(starts))
        ),
    )


def _goldens(folder: Path, ec: EmbeddingCollection, manifest: Manifest) -> Goldens:
    sampled = sample_bags(manifest, {})
    ends = np.cumsum(sampled.lengths)[:-1]
    bags_of_all = iter(np.split(sampled.ids, ends))
    bags = {
        feature: [next(bags_of_all).tolist() for _ in range(sampled.lengths.shape[1])]
        for feature in manifest.features
    }
    tables = TablesFile.open(folder / "tables.safetensors", manifest.tables)
    answers = [rows_of(ids, manifest, bags) for ids in (source_rows(ec), _dequantized(tables))]
    return Goldens(sampled, *answers)


def write_small_files(folder: Path, manifest: Manifest, plan: Plan, goldens: Goldens) -> None:
    """Writes all files of a version except its tables."""
    save_goldens(goldens, folder / "goldens.safetensors")
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    files = {name: hashlib.sha256((folder / name).read_bytes()) for name in CHECKED_FILES}
    written = manifest.to_json() | {"files": {name: one.hexdigest() for name, one in files.items()}}
    (folder / "manifest.json").write_bytes(sealed_json(written))


def _dequantized(tables: TablesFile) -> dict[str, np.ndarray]:
    return {
        name: dequantize_rows(tables.rows(name), table.dtype, table.embedding_dim)
        for name, table in tables.tables.items()
    }


def source_rows(ec: EmbeddingCollection) -> dict[str, np.ndarray]:
    return {name: table.weight.detach().numpy() for name, table in ec.embeddings.items()}


def rows_of(tables: Mapping[str, np.ndarray], manifest: Manifest, bags: Bags) -> np.ndarray:
    """Returns the expected rows, float32 [N, dim]: for each of ``manifest.keys`` a row per id."""
    return np.concatenate(
        [
            tables[table.name][to_kjt(bags, [feature])[0]]
            for table in manifest.tables
            for feature in table.feature_names
        ]
    )
