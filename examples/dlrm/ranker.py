"""Ranking service without tables: it gets pooled vectors from embedserve and runs DLRM's dense
part.

    python -m examples.dlrm.ranker FOLDER --embedserve 127.0.0.1:8001 --port 8020

POST /rank {"numbers": [[…] * n], "ids": {"cat_0": [[id] or []] * n, …}} returns {"scores": [n]}.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from embedserve_client import AsyncGrpcEmbedClient
from examples.checkpoint import load
from examples.dlrm.model import DensePart


class Impressions(BaseModel):
    """Impressions to rank.

    Attributes:
        numbers: 13 numbers per impression.
        ids: no id or one id per feature and impression.
    """

    numbers: list[list[float]]
    ids: dict[str, list[list[int]]]


def make_app(folder: Path, embedserve: str) -> FastAPI:
    dense_part = load(DensePart(), folder / "checkpoint")

    @asynccontextmanager
    async def connected(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncGrpcEmbedClient(embedserve) as client:
            app.state.client = client
            yield

    app = FastAPI(lifespan=connected)

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.post("/rank")
    async def rank(impressions: Impressions) -> dict[str, list[float]]:
        vectors = await app.state.client.embed(impressions.ids, model="dlrm")
        with torch.inference_mode():
            scores = dense_part(
                torch.tensor(impressions.numbers), torch.from_numpy(vectors.values.copy())
            )
        return {"scores": scores.tolist()}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="as train.py filled it")
    parser.add_argument("--embedserve", default="127.0.0.1:8001", help="its gRPC address")
    parser.add_argument("--port", type=int, default=8020)
    chosen = parser.parse_args()
    app = make_app(chosen.folder, chosen.embedserve)
    uvicorn.run(app, port=chosen.port, log_level="warning")


if __name__ == "__main__":
    main()
