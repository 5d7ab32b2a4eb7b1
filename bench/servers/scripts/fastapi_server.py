"""FastAPI server with an nn.EmbeddingBag per table: one lookup per request.

    fastapi_server.py TABLES_FOLDER TABLES PORT [typed]

With "typed" the route has a return type, and pydantic serializes the response. Without it FastAPI
first visits every number in Python.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI
from pydantic import RootModel
from torch import nn

torch.set_num_threads(1)


class Features(RootModel[dict[str, list[list[int]]]]):
    """Request: {"f0": [[id, …] per example], …}."""


class Answer(RootModel[dict[str, list[list[float]]]]):
    """Response: {"values": [[…] per example]}."""


class Tables:
    def __init__(self, folder: Path, count: int) -> None:
        weights = [torch.from_numpy(np.load(folder / f"t{i}.npy")) for i in range(count)]
        self._tables = {
            f"f{i}": nn.EmbeddingBag.from_pretrained(weight, mode="sum", include_last_offset=True)
            for i, weight in enumerate(weights)
        }

    @torch.inference_mode()
    def pool(self, features: dict[str, list[list[int]]]) -> list[list[float]]:
        pooled = []
        for name, table in self._tables.items():
            bags = features[name]
            ids = torch.tensor([one for bag in bags for one in bag], dtype=torch.long)
            offsets = torch.tensor([0, *np.cumsum([len(bag) for bag in bags])])
            pooled.append(table(ids, offsets))
        return torch.cat(pooled, dim=1).tolist()


def make_app(tables: Tables, is_typed: bool) -> FastAPI:
    app = FastAPI()

    async def embed(features: Features) -> Answer:
        return Answer({"values": tables.pool(features.root)})

    async def embed_untyped(features: Features) -> dict[str, Any]:
        return {"values": tables.pool(features.root)}

    if is_typed:
        app.post("/embed")(embed)
    else:
        app.post("/embed", response_model=None)(embed_untyped)
    return app


if __name__ == "__main__":
    folder, count, port, *flags = sys.argv[1:]
    app = make_app(Tables(Path(folder), int(count)), "typed" in flags)
    uvicorn.run(app, port=int(port), log_level="error", access_log=False)
