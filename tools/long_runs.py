"""Command line options of `make fuzz` and `make soak`: duration, seed and output folder."""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Chosen:
    minutes: float
    seed: int
    folder: Path


def chosen(name: str, description: str, minutes: float) -> Chosen:
    """Parses the command line; ``minutes`` is the default duration."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--output", type=Path, help="folder for the logs and the picture")
    said = parser.parse_args()
    folder = said.output or Path(tempfile.mkdtemp(prefix=f"{name}-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {said.seed}, {said.minutes:g} minutes, logs in {folder}", flush=True)
    return Chosen(said.minutes, said.seed, folder)
