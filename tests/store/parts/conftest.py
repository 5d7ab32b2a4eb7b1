"""Fixtures: versions that are published for several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

from embedserve_store import PublishedVersion, publish

PARTS = 3
DTYPES = {"single": "float32", "halves": "float16", "bytes": "int8", "nibbles": "int4"}


def collection(*, is_weighted: bool = False) -> EmbeddingBagCollection:
    """Returns a collection with a table for each dtype: a shared feature, means and sums, and
    padded widths."""
    torch.manual_seed(3)
    described: list[tuple[str, int, int, list[str], str]] = [
        ("single", 301, 6, ["single", "shared"], "mean"),
        ("halves", 200, 16, ["halves"], "sum"),
        ("bytes", 250, 10, ["bytes", "shared"], "mean"),
        ("nibbles", 500, 32, ["nibbles"], "sum"),
    ]
    return EmbeddingBagCollection(
        is_weighted=is_weighted,
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=features,
                pooling=PoolingType[pooling.upper()],
            )
            for name, rows, dim, features, pooling in described
        ],
    )


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
    return publish(collection(is_weighted=is_weighted), store, model="m", **given)
