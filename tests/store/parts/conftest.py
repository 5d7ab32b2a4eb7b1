"""Fixtures: versions that are published for several hosts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pooled import collection
from torchrec import EmbeddingBagCollection, PoolingType

from embedserve_store import PublishedVersion, publish

PARTS = 3
DTYPES = {"single": "float32", "halves": "float16", "bytes": "int8", "nibbles": "int4"}


def collection_of_parts(*, is_weighted: bool = False) -> EmbeddingBagCollection:
    """Returns a collection with a table for each dtype: a shared feature, means and sums, and
    padded widths."""
    torch.manual_seed(3)
    tables = [
        ("single", 301, 6, ["single", "shared"], PoolingType.MEAN),
        ("halves", 200, 16, ["halves"], PoolingType.SUM),
        ("bytes", 250, 10, ["bytes", "shared"], PoolingType.MEAN),
        ("nibbles", 500, 32, ["nibbles"], PoolingType.SUM),
    ]
    return collection(tables, is_weighted=is_weighted)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a store with version 1 of "m" in PARTS parts, with vocabularies; not to be
    changed."""
    store = tmp_path_factory.mktemp("hosts") / "store"
    publish_hosts(store)
    return store


def publish_hosts(store: Path, *, is_weighted: bool = False, **options: Any) -> PublishedVersion:
    given: dict[str, Any] = {
        "dtype": DTYPES,
        "hosts": PARTS,
        "vocabularies": {"halves": range(7, 207)},
    } | options
    return publish(collection_of_parts(is_weighted=is_weighted), store, model="m", **given)
