"""Damages the files of a published version, and checks that opening or verifying it fails."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
from fuzz.mutate import mutated
from running_servers import run_warm_command
from safetensors.numpy import save_file
from writable import writable

from embedserve_store import ModelStore, StoreError
from embedserve_store.verification import verify

MODEL = "m"
TABLE = (
    "tables: [{name: t, num_embeddings: 50, embedding_dim: 4, feature_names: [user], pooling: sum}]"
)


def publish(folder: Path) -> ModelStore:
    """Publishes a small model, and makes its files writable."""
    rows = np.arange(200, dtype=np.float32).reshape(50, 4)
    save_file({"embedding_bags.t.weight": rows}, folder / "model.safetensors")
    (folder / "tables.yaml").write_text(TABLE)
    names = (folder / "model.safetensors", folder / "tables.yaml", folder / "store")
    done = run_warm_command("publish", *names, "--model", MODEL)
    assert done.returncode == 0, done.stderr
    return ModelStore(writable(folder / "store"))


def fuzz_store(store: ModelStore, end_s: float, inputs_max: int, random: Random) -> Counter[str]:
    """Returns how often each file was damaged until monotonic ``end_s``, or until the largest
    number of inputs.

    Raises:
        AssertionError: a damage was not detected, or not reported as a StoreError.
    """
    changed: Counter[str] = Counter()
    files = sorted(store.load(MODEL).path.iterdir())
    right = {path: path.read_bytes() for path in files}
    others = list(right.values())
    while time.monotonic() < end_s and changed.total() < inputs_max:
        path = random.choice(files)
        path.write_bytes(mutated(random, right[path], others))
        try:
            verify(store.load(MODEL))
        except StoreError:
            pass
        else:
            raise AssertionError(f"{path.name}: nothing is said of {path.read_bytes()!r}")
        finally:
            path.write_bytes(right[path])
        changed[path.name] += 1
    verify(store.load(MODEL))
    return changed
