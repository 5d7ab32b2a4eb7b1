"""Runs the whole example: trains a DLRM, publishes its tables, serves them, and ranks with them.

    python -m examples.dlrm.run [--folder FOLDER] [--http-port 8010] [--grpc-port 8011]

Compares the scores of the ranking service with the whole model, and exits with 1 if they differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
import torch

from examples.checkpoint import load
from examples.commands import EMBEDSERVE, module, run, started
from examples.dlrm.model import make_dlrm
from examples.dlrm.train import clicks

DIFFERENCE_MAX = 1e-6
"""Largest accepted difference of probabilities in float32."""


def rank(port: int, body: dict[str, object]) -> np.ndarray:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/rank",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return np.array(json.load(answer)["scores"], np.float32)


def compare(folder: Path, port: int) -> float:
    """Prints the accuracy of the scores; returns their greatest difference from the whole
    model's."""
    _, held_out = clicks()
    bags = {
        name: [[one] if one >= 0 else [] for one in column.tolist()]
        for name, column in zip(held_out.bags(), held_out.ids.T, strict=True)
    }
    scores = rank(port, {"numbers": held_out.numbers.tolist(), "ids": bags})
    whole = load(make_dlrm(), folder / "checkpoint")
    with torch.inference_mode():
        logits = whole(torch.from_numpy(held_out.numbers), held_out.to_kjt())
    expected = logits.squeeze(1).sigmoid().numpy()
    clicked = held_out.clicked > 0.5
    right, share = np.mean((scores > 0.5) == clicked), np.mean(clicked)
    constant = max(share, 1 - share)
    print(f"{len(scores):,} impressions ranked, {right:.0%} rightly, by a constant {constant:.0%}")
    return float(np.abs(scores - expected).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="for what is trained and published")
    parser.add_argument("--http-port", type=int, default=8010)
    parser.add_argument("--grpc-port", type=int, default=8011)
    parser.add_argument("--ranker-port", type=int, default=8020)
    chosen = parser.parse_args()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="dlrm-"))
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "store"
    run(*module("examples.dlrm.train"), folder)
    published = ("publish", folder / "checkpoint", folder / "tables.yaml", store, "--model", "dlrm")
    run(*EMBEDSERVE, *published, "--expected", folder / "expected.safetensors")
    ports = ("--http-port", chosen.http_port, "--grpc-port", chosen.grpc_port)
    grpc = f"127.0.0.1:{chosen.grpc_port}"
    ranker = (folder, "--embedserve", grpc, "--port", chosen.ranker_port)
    ready = f"http://127.0.0.1:{chosen.http_port}/health/ready"
    health = f"http://127.0.0.1:{chosen.ranker_port}/health"
    with (
        started(*EMBEDSERVE, "serve", store, *ports, ready=ready),
        started(*module("examples.dlrm.ranker"), *ranker, ready=health),
    ):
        difference = compare(folder, chosen.ranker_port)
    print(f"greatest difference from the whole model's scores: {difference:.2g}")
    sys.exit(0 if difference <= DIFFERENCE_MAX else 1)


if __name__ == "__main__":
    main()
