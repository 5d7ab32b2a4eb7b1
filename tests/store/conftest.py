"""Fixtures: small models and published versions for the tests of the model store."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pooled import collection
from torchrec import EmbeddingBagCollection, PoolingType
from writable import writable

from embedserve_store.format.manifest import CHECKED_FILES, Manifest
from embedserve_store.format.manifest_checksum import sealed_json
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.goldens.goldens_file import Goldens, save_goldens
from embedserve_store.goldens.sampled_bags import sample_bags
from embedserve_store.local_store import LocalStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.plans.plan import Plan, Shard, TablePlan
from embedserve_store.publishing.publish import publish

ROWS = {"user": 300, "item": 77, "tag": 16}

MakeEbc = Callable[..., EmbeddingBagCollection]


def small_collection(
    *, is_weighted: bool = False, pooling: str | None = None, half: bool = False
) -> EmbeddingBagCollection:
    """Returns a collection of three tables, with two poolings, a table of two features and a
    feature of two tables."""
    torch.manual_seed(7)
    sums, means = PoolingType.SUM, PoolingType.MEAN
    if pooling is not None:
        sums = means = PoolingType[pooling.upper()]
    tables = [
        ("user", ROWS["user"], 16, ["user", "friend"], sums),
        ("item", ROWS["item"], 8, ["item"], means),
        ("tag", ROWS["tag"], 4, ["tag", "item"], sums),
    ]
    ebc = collection(tables, is_weighted=is_weighted)
    return ebc.half() if half else ebc


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """Yields a named pipe. Its writer, which writes nothing, lets a reader continue that should not
    wait for one."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    try:
        yield path
    finally:
        os.close(writer)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sets up a process group with this process alone."""
    meeting = tmp_path_factory.mktemp("meeting") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def make_ebc() -> MakeEbc:
    return small_collection


@pytest.fixture
def ebc() -> EmbeddingBagCollection:
    return small_collection()


@pytest.fixture(scope="session")
def published_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a store with version 1 of model "m", a dtype for each table; not to be changed."""
    store = tmp_path_factory.mktemp("published") / "store"
    dtypes = {"user": "float32", "item": "int8", "tag": "int4"}
    publish(small_collection(), store, model="m", dtype=dtypes, sharding="row_wise", world_size=2)
    return store


@pytest.fixture
def version(published_store: Path, tmp_path: Path) -> ModelVersion:
    """Returns a test's own copy of the version in published_store, which the test may damage."""
    store = writable(shutil.copytree(published_store, tmp_path / "store"))
    return LocalStore(store).load("m")


@pytest.fixture
def edit_json() -> Callable[[Path, Callable[[Any], None]], None]:
    """Returns a function that changes a JSON file in place, and its sha256 in the manifest beside
    it."""

    def edit(path: Path, change: Callable[[Any], None]) -> None:
        data = json.loads(path.read_bytes())
        change(data)
        path.write_bytes(sealed_json(data) if path.name == "manifest.json" else dumped(data))
        if path.name in CHECKED_FILES:
            sign(path.parent)

    return edit


def dumped(data: Any) -> bytes:
    return json.dumps(data).encode()


def sign(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["files"] = {name: _sha256(folder / name) for name in CHECKED_FILES}
    (folder / "manifest.json").write_bytes(sealed_json(manifest))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def write_version() -> Callable[[Path, Sequence[TableSpec]], Path]:
    """Returns a function that writes version 1 of "m" with zeros as results, but no
    tables.safetensors."""

    def write(store: Path, tables: Sequence[TableSpec]) -> Path:
        folder = store / "m" / "1"
        folder.mkdir(parents=True)
        manifest = Manifest("m", 1, tuple(tables), is_weighted=False)
        plan = Plan(1, {table.name: _on_one_rank(table) for table in tables}, {})
        bags = sample_bags(manifest, {})
        answers = np.zeros((bags.lengths.shape[1], sum(manifest.length_per_key)), np.float32)
        save_goldens(Goldens(bags, answers, answers), folder / "goldens.safetensors")
        (folder / "plan.json").write_text(json.dumps(plan.to_json()))
        (folder / "manifest.json").write_text(json.dumps(manifest.to_json()))
        sign(folder)
        return folder

    return write


def _on_one_rank(table: TableSpec) -> TablePlan:
    shard = Shard(0, 0, table.num_embeddings, 0, table.embedding_dim)
    return TablePlan("table_wise", (shard,))
