"""NVIDIA's Triton, which is told what to load, for `make swaps`: as the benchmark runs it
(bench/servers/triton.py: Python backend, one instance, dynamic batching, one HTTP thread).

What was chosen so that it serves as well as it can while the version changes:

- Its repository has all versions of one model. A move writes another number into the model's
  `version_policy`, and asks for a load (explicit model control). Triton then loads that version
  beside the one that answers, and lets go of that one only afterwards; a request that names no
  version is answered by the highest that is loaded, and the answer says which.
- The load is asked for over gRPC: over REST it holds the one thread of REST until it is done, and
  whoever asks by REST waits for seconds.
- A version's rows are one file in its folder, which the script maps: nothing is read or copied
  before it is needed, and versions share the page cache as embedserve's do. What a load then takes
  is the start of a process, which Triton's Python backend has for each version, and mostly its
  import of torch, whose kernel pools; embedserve's processes import it once.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
import numpy as np
from servers.open_inference import (
    binary_answer,
    grpc_answer,
    grpc_load,
    infer_body,
    infer_headers,
)
from servers.triton import LOAD, MODEL, Triton, add_version, tensors_of
from swaps.server import DIM, TABLES, CallTarget, Codec, SwapServer, row_values
from workloads import Request as Jagged

_, BINARY, GRPC = Triton.ways
JOINED = "joined.npy"
"""As bench/servers/scripts/pooling.py has it, which imports torch."""


def jagged(ids: Sequence[np.ndarray]) -> Jagged:
    """One example, of as many features as there are tables."""
    lengths = np.array([[one.size] for one in ids], np.int32)
    return Jagged(lengths, np.concatenate(ids))


def encode_rest(ids: Sequence[np.ndarray]) -> bytes:
    return infer_body(BINARY, MODEL, tensors_of(jagged(ids)))


def encode_grpc(ids: Sequence[np.ndarray]) -> bytes:
    return infer_body(GRPC, MODEL, tensors_of(jagged(ids)))


def headers(message: bytes) -> Mapping[str, str]:
    return infer_headers(BINARY, message)


def decode_rest(body: bytes) -> tuple[int, np.ndarray]:
    version, values = binary_answer(body)
    return version, values.ravel()


def decode_grpc(body: bytes) -> tuple[int, np.ndarray]:
    version, values = grpc_answer(body)
    return version, values.ravel()


class TritonServer(SwapServer):
    """Installs its environment where it is missing, which takes minutes."""

    rest = Codec(encode_rest, decode_rest, headers)
    grpc = Codec(encode_grpc, decode_grpc)
    method = GRPC.path
    ready_path = "/v2/health/ready"
    targets = (CallTarget(BINARY.path, b"", is_followed=True),)

    def __init__(self, folder: Path, chosen: argparse.Namespace) -> None:
        self._repository = folder / "repository"
        self._rows = chosen.rows
        self._triton = Triton()
        self._triton.install()
        self._address = ""

    def publish(self, version: int) -> None:
        add_version(self._repository, version)
        rows = np.arange(self._rows)
        joined = np.concatenate([row_values(version, table, rows) for table in range(TABLES)])
        np.save(self.tables(version), joined)

    def tables(self, version: int) -> Path:
        return self._repository / MODEL / str(version) / JOINED

    def command(self, http_port: int, grpc_port: int) -> list[str]:
        self._configure(1)
        self._address = f"127.0.0.1:{grpc_port}"
        serve = self._triton.serve(self._repository, http_port, grpc_port)
        return [*serve, "--model-control-mode=explicit", f"--load-model={MODEL}"]

    def environment(self) -> Mapping[str, str]:
        # The folders of PYTHONPATH are of this process, and not for the interpreter of the model.
        return {**self._triton.environment(), "PYTHONPATH": ""}

    async def move(self, version: int) -> None:
        """Returns once the version is loaded."""
        self._configure(version)
        async with grpc.aio.insecure_channel(self._address) as channel:
            await channel.unary_unary(LOAD)(grpc_load(MODEL))

    def _configure(self, version: int) -> None:
        tables = self._repository / MODEL / "{version}"
        self._triton.configure(self._repository, tables, TABLES, DIM, version)
