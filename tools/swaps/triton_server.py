"""NVIDIA's Triton for `make swaps`, configured as in the benchmark (bench/servers/triton.py: Python
backend, one instance, dynamic batching, one HTTP thread).

These choices let it serve as well as it can while the version changes:

- The repository has all versions of one model. A switch writes another number into the model's
  `version_policy`, and requests a load (explicit model control). Triton then loads that version
  beside the serving version, which it unloads afterwards. A request without a version gets the
  highest loaded version, and the response names it.
- The load is requested over gRPC. Over REST the load would block Triton's one REST thread until it
  is done, and REST callers would wait for seconds.
- The rows of a version are one file in its folder, which the script maps. No row is read or copied
  before it is needed, and versions share the page cache as embedserve's do. The rest of a load is
  the start of a process for each version, mostly its import of torch for the pooling kernel.
  embedserve's processes import torch once.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
import numpy as np
from servers.open_inference import binary_answer, grpc_answer, grpc_load, infer_body, infer_headers
from servers.triton import LOAD, MODEL, Triton, add_version, tensors_of
from swaps.server import DIM, TABLES, CallTarget, Codec, SwapServer, row_values
from workloads import Request as Jagged

_, BINARY, GRPC = Triton.ways
JOINED = "joined.npy"
"""Name of the file with the rows. bench/servers/scripts/pooling.py has the same, but imports torch.
"""


def jagged(ids: Sequence[np.ndarray]) -> Jagged:
    """Returns one example, with a feature for each table."""
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
    """Installs Triton's environment if it is missing, which takes minutes."""

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

    def commands(self, http_port: int, grpc_port: int) -> list[list[str]]:
        self._configure(1)
        self._address = f"127.0.0.1:{grpc_port}"
        serve = self._triton.serve(self._repository, http_port, grpc_port)
        return [[*serve, "--model-control-mode=explicit", f"--load-model={MODEL}"]]

    def environment(self) -> Mapping[str, str]:
        # The folders of PYTHONPATH are of this process, and not for the interpreter of the model.
        return {**self._triton.environment(), "PYTHONPATH": ""}

    async def move(self, version: int) -> None:
        """Loads a version, and returns once it is loaded."""
        self._configure(version)
        async with grpc.aio.insecure_channel(self._address) as channel:
            await channel.unary_unary(LOAD)(grpc_load(MODEL))

    def _configure(self, version: int) -> None:
        tables = self._repository / MODEL / "{version}"
        self._triton.configure(self._repository, tables, TABLES, DIM, version)
