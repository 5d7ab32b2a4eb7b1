"""Fixture: publishes versions to compare."""

from pathlib import Path
from typing import Any

import pytest
from store.comparison.rows import Publish, Tables

from embedserve_store.format.table_spec import TableSpec
from embedserve_store.local_store import LocalStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.publishing.publish import publish


@pytest.fixture
def publish_tables(tmp_path: Path) -> Publish:
    """Returns a function that publishes tables of the given rows as the next version of "m"."""

    def run(
        tables: Tables, pooling: str = "sum", features: tuple[str, ...] = (), **options: Any
    ) -> ModelVersion:
        options |= {"model": "m", "layout_changed": True}
        specs = [
            TableSpec(name, len(rows), rows.shape[1], features or (name,), pooling, "float32")
            for name, rows in tables.items()
        ]
        state = {f"embedding_bags.{name}.weight": rows for name, rows in tables.items()}
        number = publish(state, tmp_path / "store", tables=specs, **options).version
        return LocalStore(tmp_path / "store").load("m", number)

    return run
