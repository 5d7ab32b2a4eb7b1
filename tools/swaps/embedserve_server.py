"""embedserve for `make swaps`, following an alias."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from running_servers import command
from safetensors.numpy import save_file
from swaps.server import DIM, TABLES, CallTarget, Codec, SwapServer, row_values

from embedserve_proto import embedding_pb2 as pb
from embedserve_store import set_alias

MODEL, ALIAS, CANARY = "swaps", "stable", "canary"
PROTOBUF = "application/x-protobuf"


def encode(ids: Sequence[np.ndarray]) -> bytes:
    return pb.EmbedRequest(
        keys=[f"f{table}" for table in range(TABLES)],
        ids=np.concatenate(ids).tolist(),
        lengths=[one.size for one in ids],
    ).SerializeToString()


def decode(body: bytes) -> tuple[int, np.ndarray]:
    answer = pb.EmbedResponse.FromString(body)
    return answer.version, np.frombuffer(answer.values, "<f4")


CODEC = Codec(encode, decode, lambda message: {"Content-Type": PROTOBUF, "Accept": PROTOBUF})


LAYOUTS = (("table_wise", 1), ("row_wise", 4), ("column_wise", 2))
"""(sharding, ranks) that versions alternate between with ``--layouts``."""


def publish(store: Path, version: int, rows: int, sharding: str, ranks: int) -> None:
    """Publishes a version in a child process, so that this process does not import torch."""
    weights = {
        f"embedding_bags.t{table}.weight": row_values(version, table, np.arange(rows))
        for table in range(TABLES)
    }
    checkpoint, tables = store.parent / "model.safetensors", store.parent / "tables.yaml"
    save_file(weights, checkpoint)
    described = [
        {
            "name": f"t{table}",
            "num_embeddings": rows,
            "embedding_dim": DIM,
            "feature_names": [f"f{table}"],
            "pooling": "sum",
        }
        for table in range(TABLES)
    ]
    tables.write_text(json.dumps({"tables": described}))
    options = ["--model", MODEL, "--world-size", ranks, "--sharding", sharding]
    subprocess.run(
        command("publish", checkpoint, tables, store, *options), check=True, capture_output=True
    )
    checkpoint.unlink()


class EmbedserveServer(SwapServer):
    """Half of the callers name the alias, the others no model. With a canary the latter meet it,
    too."""

    rest = grpc = CODEC
    method = "/embedserve.v1.EmbeddingService/Embed"
    ready_path = "/health/ready"
    targets = (
        CallTarget(
            f"/models/{MODEL}@{ALIAS}/embed",
            pb.EmbedRequest(model=f"{MODEL}@{ALIAS}").SerializeToString(),
            is_followed=True,
        ),
        CallTarget("/embed", b"", is_followed=False),
    )

    def __init__(self, folder: Path, chosen: argparse.Namespace) -> None:
        self._store = folder / "store"
        self._chosen = chosen

    def publish(self, version: int) -> None:
        if not self.tables(version).exists():
            layout = LAYOUTS[(version - 1) % len(LAYOUTS) if self._chosen.layouts else 0]
            publish(self._store, version, self._chosen.rows, *layout)

    def tables(self, version: int) -> Path:
        return self._store / MODEL / str(version) / "tables.safetensors"

    def command(self, http_port: int, grpc_port: int) -> list[str]:
        set_alias(self._store, MODEL, ALIAS, 1)
        serve = [
            *command("serve", self._store, "--model", f"{MODEL}@{ALIAS}", "--follow", "alias"),
            *("--default-model", MODEL),
            *("--follow-s", "0.1", "--workers", str(self._chosen.workers)),
            *("--http-port", str(http_port), "--grpc-port", str(grpc_port)),
        ]
        if self._chosen.canary:
            serve += ["--model", f"{MODEL}@{CANARY}"]
            self.move_canary(2)
        return serve

    async def move(self, version: int) -> None:
        """Moves the alias in a thread, because this process times the callers and must not wait for
        the disk."""
        await asyncio.to_thread(set_alias, self._store, MODEL, ALIAS, version)

    def move_canary(self, version: int) -> None:
        if self._chosen.canary:
            percents = {"share": self._chosen.canary, "shadow": self._chosen.shadow}
            set_alias(self._store, MODEL, CANARY, version, **percents)
