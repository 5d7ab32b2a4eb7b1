"""Saves a whole model with torch.distributed.checkpoint, and loads parts of it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed.checkpoint as dcp

Part = TypeVar("Part", bound=torch.nn.Module)


def save(model: torch.nn.Module, folder: Path) -> None:
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)


def load(part: Part, folder: Path) -> Part:
    """Loads the weights of ``part`` and returns it. The rest of the checkpoint is not read."""
    state = {"model": part.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    part.load_state_dict(state["model"])
    part.eval()
    return part
