"""A store with one small model. Another process publishes it, so this process imports no torch."""

from pathlib import Path

from server.python import run_warm_python

PUBLISH = """
import sys, torch
from embedserve.commands.cli import app
checkpoint, tables, store, *sharding = sys.argv[1:]
torch.save({"embedding_bags.t_user.weight": torch.ones(7, 4)}, checkpoint)
app(["publish", checkpoint, tables, store, "--model", "shop", *sharding])
"""
TABLES = """
tables:
- {name: t_user, num_embeddings: 7, embedding_dim: 4, feature_names: [user], pooling: sum}
"""


TWO_RANKS = ("--sharding", "row_wise", "--world-size", "2")


def publish_small_model(folder: Path, *sharding: str) -> Path:
    """Publishes version 1 of model shop below ``folder``; returns the store.

    Args:
        sharding: options of publish, such as TWO_RANKS. Default: one rank, which a server restores
            in a twentieth of the time.
    """
    (folder / "tables.yaml").write_text(TABLES)
    paths = folder / "model.pt", folder / "tables.yaml", folder / "store"
    done = run_warm_python("-c", PUBLISH, *paths, *sharding)
    assert done.returncode == 0, done.stderr
    return folder / "store"
