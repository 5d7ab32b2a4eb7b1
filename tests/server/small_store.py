"""A store with one small model, published in another process: torch stays out of this one."""

from __future__ import annotations

from pathlib import Path

from server.python import run_warm_python

PUBLISH = """
import sys, torch
from embedserve.commands.cli import app
checkpoint, tables, store = sys.argv[1:]
torch.save({"embedding_bags.t_user.weight": torch.ones(7, 4)}, checkpoint)
options = "--model shop --sharding row_wise --world-size 2"
app(["publish", checkpoint, tables, store, *options.split()])
"""
TABLES = """
tables:
- {name: t_user, num_embeddings: 7, embedding_dim: 4, feature_names: [user], pooling: sum}
"""


def publish_small_model(folder: Path) -> Path:
    """Publishes version 1 of model shop below ``folder``; returns the store."""
    (folder / "tables.yaml").write_text(TABLES)
    done = run_warm_python(
        "-c", PUBLISH, folder / "model.pt", folder / "tables.yaml", folder / "store"
    )
    assert done.returncode == 0, done.stderr
    return folder / "store"
