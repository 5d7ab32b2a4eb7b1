"""Fixture: publishes versions to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from store.comparison.rows import Publish, Tables
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

from embedserve_store.local_store import LocalStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.publishing.publish import publish


@pytest.fixture
def publish_tables(tmp_path: Path) -> Publish:
    """Returns a function that publishes tables of the given rows as the next version of "m"."""

    def run(tables: Tables, **options: Any) -> ModelVersion:
        pooling = options.pop("pooling", PoolingType.SUM)
        is_weighted = options.pop("is_weighted", False)
        features = options.pop("features", {})
        ebc = EmbeddingBagCollection(
            is_weighted=is_weighted,
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=len(rows),
                    embedding_dim=rows.shape[1],
                    feature_names=features.get(name, [name]),
                    pooling=pooling,
                )
                for name, rows in tables.items()
            ],
        )
        with torch.no_grad():
            for name, rows in tables.items():
                ebc.embedding_bags[name].weight.copy_(rows)
        number = publish(ebc, tmp_path / "store", model="m", layout_changed=True, **options).version
        return LocalStore(tmp_path / "store").load("m", number)

    return run
