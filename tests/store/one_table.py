"""A model of one small table, for tests that only need versions of a model."""

from pathlib import Path
from typing import Any

import torch

from embedserve_store.format.table_spec import TableSpec
from embedserve_store.publishing.publish import publish
from embedserve_store.publishing.version_writer import PublishedVersion

STATE = {"embedding_bags.t.weight": torch.ones(10, 4)}
TABLES = [TableSpec("t", 10, 4, ("t",), "sum", "float32")]


def publish_versions(
    store: Path | str, count: int = 1, value: float = 1.0, **options: Any
) -> PublishedVersion:
    """Publishes ``count`` versions of "m" whose rows are ``value``; returns the last one."""
    state = {name: rows * value for name, rows in STATE.items()}
    published = [publish(state, store, model="m", tables=TABLES, **options) for _ in range(count)]
    return published[-1]
