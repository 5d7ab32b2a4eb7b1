"""embedserve for `make swaps`, following an alias: one server, or shards and their router."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from running_servers import command, free_port
from safetensors.numpy import save_file
from swaps.server import DIM, TABLES, CallTarget, Codec, SwapServer, row_values

from embedserve_proto import embedding_pb2 as pb
from embedserve_store import set_alias

MODEL, ALIAS, CANARY = "swaps", "stable", "canary"
FOLLOW_S = 0.1
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
LAYOUT, LAYOUT_IN_PARTS = LAYOUTS[0], ("row_wise", 1)
"""(sharding, ranks) of all versions otherwise. In parts the rows of each table are divided."""


def publish(
    store: Path, version: int, rows: int, sharding: str, ranks: int, *, parts: int = 0
) -> None:
    """Publishes a version in a child process, so that this process does not import torch. With
    ``parts`` its tables are divided into as many."""
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
    options += ["--hosts", parts] if parts else []
    subprocess.run(
        command("publish", checkpoint, tables, store, *options), check=True, capture_output=True
    )
    checkpoint.unlink()


class EmbedserveServer(SwapServer):
    """One server of whole tables; with ``--parts`` a router, and replicas of shards that hold all
    versions beside each other.

    Half of the callers name the alias, the others no model. With a canary the latter meet it, too.
    """

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
            parts = self._chosen.parts
            layout = LAYOUT_IN_PARTS if parts else LAYOUT
            if self._chosen.layouts:
                layout = LAYOUTS[(version - 1) % len(LAYOUTS)]
            publish(self._store, version, self._chosen.rows, *layout, parts=parts)

    def tables(self, version: int) -> Path:
        return self._store / MODEL / str(version) / "tables.safetensors"

    def commands(self, http_port: int, grpc_port: int) -> list[list[str]]:
        set_alias(self._store, MODEL, ALIAS, 1)
        names = ["--model", f"{MODEL}@{ALIAS}", "--default-model", MODEL, "--follow", "alias"]
        if self._chosen.canary:
            names += ["--model", f"{MODEL}@{CANARY}"]
            self.move_canary(2)
        options = [*names, "--workers", self._chosen.workers]
        shards: list[list[str]] = []
        if self._chosen.parts:
            shards, addresses = self._shards()
            options += ["--shards", f"file:{addresses}", "--row-cache", self._chosen.row_cache]
        return [*shards, self._serve(http_port, grpc_port, *options)]

    def _shards(self) -> tuple[list[list[str]], Path]:
        """Returns the command of each shard, and the file with their addresses."""
        parts, replicas = self._chosen.parts, self._chosen.replicas
        commands: list[list[str]] = []
        addresses: dict[int, list[str]] = {}
        for part in range(parts):
            ports = [(free_port(), free_port()) for _ in range(replicas)]
            addresses[part] = [f"127.0.0.1:{grpc_port}" for _, grpc_port in ports]
            options = ("--part", f"{part}/{parts}", "--model", MODEL, "--follow", "latest")
            held = ("--versions-held", self._chosen.versions)
            commands += [self._serve(*pair, *options, *held) for pair in ports]
        path = self._store.parent / "shards.json"
        path.write_text(json.dumps(addresses))
        return commands, path

    def _serve(self, http_port: int, grpc_port: int, *options: object) -> list[str]:
        ports = ("--http-port", http_port, "--grpc-port", grpc_port)
        return command("serve", self._store, "--follow-s", FOLLOW_S, *ports, *options)

    async def move(self, version: int) -> None:
        """Moves the alias in a thread, because this process times the callers and must not wait for
        the disk."""
        await asyncio.to_thread(set_alias, self._store, MODEL, ALIAS, version)

    def move_canary(self, version: int) -> None:
        if self._chosen.canary:
            percents = {"share": self._chosen.canary, "shadow": self._chosen.shadow}
            set_alias(self._store, MODEL, CANARY, version, **percents)
