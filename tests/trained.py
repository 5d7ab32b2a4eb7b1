"""Runs trainer.py in processes, and reads the files that it writes."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml
from server.python import run_warm_python

TIMEOUT_S = 600


@dataclass(frozen=True)
class Trained:
    world_size: int
    """Number of processes that trained."""
    checkpoint: Path
    """DCP folder of the larger model and its optimizer."""
    description: Path
    """YAML file that describes the tables, for publishing."""
    state_dict: Path
    """Whole tables alone, saved by torch.save."""
    tables: dict[str, torch.Tensor]
    features: list[tuple[str, str, str]]
    """(table, feature, pooling), in the order of the response."""
    bags: dict[str, list[list[int]]]
    """Sampled ids by feature."""
    answers: dict[str, np.ndarray]
    """Results of the trained model for the bags: float32 [bags, dim] by feature."""


def train(folder: Path, world_size: int, dtype: str = "float32") -> None:
    """Trains a few steps over ``world_size`` gloo processes; takes about ten seconds."""
    script = Path(__file__).with_name("trainer.py")
    done = run_warm_python(script, str(world_size), folder, dtype, timeout_s=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"trainer.py failed:\n{done.stderr[-4000:]}")


def read_trained(folder: Path, world_size: int) -> Trained:
    """Reads the results of a training run of ``world_size`` processes from ``folder``."""
    described = yaml.safe_load((folder / "tables.yaml").read_text())["tables"]
    features = [(t["name"], f, t["pooling"]) for t in described for f in t["feature_names"]]
    gathered = torch.load(folder / "gathered.pt", weights_only=True)
    with np.load(folder / "answers.npz") as saved:
        arrays = dict(saved)
    return Trained(
        world_size=world_size,
        checkpoint=folder / "checkpoint",
        description=folder / "tables.yaml",
        state_dict=folder / "gathered.pt",
        tables={key.split(".")[-2]: table for key, table in gathered.items()},
        features=features,
        bags=_bags(arrays["ids"], arrays["lengths"], [feature for _, feature, _ in features]),
        answers={feature: arrays[f"answer.{feature}"] for _, feature, _ in features},
    )


def _bags(ids: np.ndarray, lengths: np.ndarray, features: list[str]) -> dict[str, list[list[int]]]:
    parts = iter(np.split(ids, np.cumsum(lengths.reshape(-1))[:-1]))
    return {
        f: [next(parts).tolist() for _ in row] for f, row in zip(features, lengths, strict=True)
    }
