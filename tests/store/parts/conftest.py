"""Fixtures: versions that are published for several hosts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from store.conftest import collection_of
from torchrec import EmbeddingBagCollection

from embedserve_store import PublishedVersion, publish

PARTS = 3
DTYPES = {"single": "float32", "halves": "float16", "bytes": "int8", "nibbles": "int4"}


def collection(*, is_weighted: bool = False) -> EmbeddingBagCollection:
    """Returns a collection with a table for each dtype: a shared feature, means and sums, and
    padded widths."""
    torch.manual_seed(3)
    return collection_of(
        ("single", 301, 6, ["single", "shared"], "mean"),
        ("halves", 200, 16, ["halves"], "sum"),
        ("bytes", 250, 10, ["bytes", "shared"], "mean"),
        ("nibbles", 500, 32, ["nibbles"], "sum"),
        is_weighted=is_weighted,
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
